"""Model architectures. They know nothing of sharding, processes or devices: `plans` and `styles` say how they are cut.

This file stays empty of imports: `presets` must be readable without loading torch.
"""
