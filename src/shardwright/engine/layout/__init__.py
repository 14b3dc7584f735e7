"""The place of every element of a sharded model. Pure data and pure functions; nothing here uses a device."""

from shardwright.engine.layout.planner import Layout, Member, Ragged, RaggedSegment, plan
from shardwright.engine.layout.segments import ALIGNMENT, Segment, TensorSpec
from shardwright.engine.layout.strategy import Strategy
from shardwright.engine.layout.units import (
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
