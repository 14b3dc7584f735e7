"""Steps on whole tensors, for optimizers such as Muon that cannot step a shard alone.

``plan`` says which rank, the owner, steps each tensor, and which bytes move to owners and back in which round.
``step`` runs the plan and lets ranks agree on its result. ``state`` has the optimizer state of one such tensor,
``updates`` the optimizers that send an update instead of new values.
"""
