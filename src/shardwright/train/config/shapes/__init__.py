"""The shapes of models as plain numbers: of native models with their presets, and of models whose code is elsewhere.

Nothing here imports torch or transformers.
"""
