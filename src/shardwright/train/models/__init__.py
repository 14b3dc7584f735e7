"""Model architectures. They know nothing of sharding, processes or devices.

This file stays empty of imports: `presets` must be readable without loading torch.
"""
