"""A documented place of names that are in `config.shapes.presets`."""

from shardwright.train.config.shapes.presets import (
    HYBRID_PRESETS,
    PRESETS,
    HybridConfig,
    LlamaConfig,
    RopeScaling,
)

__all__ = ["HYBRID_PRESETS", "PRESETS", "HybridConfig", "LlamaConfig", "RopeScaling"]
