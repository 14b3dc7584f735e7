"""Where every element of a sharded model lives. Pure data and pure functions; nothing here touches a device."""

from shardwright.layout.planner import Layout, Member, Ragged, plan
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
from shardwright.layout.strategy import NAMES, Strategy, resolve

__all__ = [
    "ALIGNMENT",
    "NAMES",
    "GradientPart",
    "Layout",
    "Member",
    "Packing",
    "Ragged",
    "Run",
    "Segment",
    "Span",
    "Strategy",
    "TensorSpec",
    "UnitLayout",
    "plan",
    "plan_packing",
    "plan_unit",
    "resolve",
]
