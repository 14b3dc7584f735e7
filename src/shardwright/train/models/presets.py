"""A documented place of names that are in `config.catalog.presets`."""

from shardwright.train.config.catalog.presets import (
    HYBRID_PRESETS,
    PRESETS,
    HybridConfig,
    LlamaConfig,
    RopeScaling,
)

__all__ = ["HYBRID_PRESETS", "PRESETS", "HybridConfig", "LlamaConfig", "RopeScaling"]
