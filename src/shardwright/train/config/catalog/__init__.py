"""Values that a key can name: engines, and what users can register: kinds of models, optimizers, sinks and hooks.

Registries name where a value is implemented, and import it when it is used. `registry_names` checks keys against them.
`train/extend.py` has their classes for users, with the records that sinks and hooks get. Nothing here imports torch.
"""
