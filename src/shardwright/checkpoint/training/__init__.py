"""The state of a training run as a checkpoint: ``save_checkpoint`` and ``load_checkpoint``, and what they store.

Model, optimizers, random generators, gradient hooks and the user's own values.
"""
