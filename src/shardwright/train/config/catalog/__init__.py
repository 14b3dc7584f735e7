"""Values that users register under a name: kinds of models, optimizers, sinks, hooks; with their protocols and records.

Registries name where a value is implemented, and import it when it is used. `train/extend.py` has the names for users.
Nothing here imports torch.
"""
