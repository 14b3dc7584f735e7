"""Where every element of a sharded model lives. Pure data and pure functions; nothing here touches a device."""

from shardwright.layout.segments import (
    ALIGNMENT,
    GradientPart,
    Packing,
    Run,
    Segment,
    Span,
    TensorSpec,
    UnitLayout,
    plan_packing,
    plan_unit,
)

__all__ = [
    "ALIGNMENT",
    "GradientPart",
    "Packing",
    "Run",
    "Segment",
    "Span",
    "TensorSpec",
    "UnitLayout",
    "plan_packing",
    "plan_unit",
]
