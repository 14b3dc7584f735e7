"""Traces of real training steps on tensors without memory, as programs for plans."""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.planner.tracing.compiled import Graphs, graphs_of_fakes
    from shardwright.planner.tracing.fakes import (
        SMALL,
        AbsentDeviceError,
        UnknownValueError,
        map_large_blocks,
    )
    from shardwright.planner.tracing.loop import local_device, plan
    from shardwright.planner.tracing.recorder import ProgramRecorder
    from shardwright.planner.tracing.saving import trace_save
    from shardwright.planner.tracing.timing import Operation, Timer, noting, time_collectives
    from shardwright.planner.tracing.tracer import CPU, trace
    from shardwright.planner.tracing.training import Calls, watch_calls, watch_training

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
