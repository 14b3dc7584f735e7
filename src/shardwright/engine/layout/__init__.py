"""The place of every element of a sharded model. Pure data and pure functions; nothing here uses a device."""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.engine.layout.planner import (
        Layout as Layout,
        Member as Member,
        Ragged as Ragged,
        RaggedSegment as RaggedSegment,
        plan as plan,
    )
    from shardwright.engine.layout.segments import (
        ALIGNMENT as ALIGNMENT,
        Segment as Segment,
        TensorSpec as TensorSpec,
    )
    from shardwright.engine.layout.strategy import Strategy as Strategy
    from shardwright.engine.layout.units import (
        GradientDtypes as GradientDtypes,
        GradientPart as GradientPart,
        Packing as Packing,
        Run as Run,
        Span as Span,
        UnitLayout as UnitLayout,
        plan_packing as plan_packing,
        plan_unit as plan_unit,
    )

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
