"""The place of every element of a sharded model. Pure data and pure functions; nothing here uses a device."""

from shardwright.layout.planner import Layout, Member, Ragged, RaggedSegment, plan
from shardwright.layout.segments import ALIGNMENT, Segment, TensorSpec
from shardwright.layout.strategy import Strategy
from shardwright.layout.units import (
    GradientDtypes,
    GradientPart,
    Packing,
    Run,
    Span,
    UnitLayout,
    plan_packing,
    plan_unit,
)

__all__ = [
    "ALIGNMENT",
    "GradientDtypes",
    "GradientPart",
    "Layout",
    "Member",
    "Packing",
    "Ragged",
    "RaggedSegment",
    "Run",
    "Segment",
    "Span",
    "Strategy",
    "TensorSpec",
    "UnitLayout",
    "plan",
    "plan_packing",
    "plan_unit",
]
