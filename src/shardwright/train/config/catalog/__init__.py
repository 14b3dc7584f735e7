"""All that a configuration can name: kinds of models and their shapes, optimizers, sinks, files on the hub.

Registries name where a value is implemented, and import it when it is used. Nothing here imports torch.
"""
