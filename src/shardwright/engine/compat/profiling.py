"""torch's profiler, and the CUDA allocator's record of allocations."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from shardwright.engine.compat.modes import NOTHING
from shardwright.engine.compat.probe import probe

_profiler_enabled = probe(torch.autograd, "_profiler_enabled")
_ProfilerConfig = probe(torch._C, "_profiler", "_ExperimentalConfig")


def record_memory_history(enabled: bool) -> None:
    """Start or stop the CUDA allocator's record of allocations and releases, with stack traces."""
    torch.cuda.memory._record_memory_history(enabled="all" if enabled else None)


def dump_memory_history(path: str) -> None:
    """Write the allocator's record into a file for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def annotate(name: str, unit: str = "") -> AbstractContextManager[Any]:
    """Return a context that makes a range in the profiler's trace, with FSDP2's name, or nothing without a profiler."""
    if not _profiler_enabled():
        return NOTHING
    return torch.profiler.record_function(f"FSDP::{name} ({unit})" if unit else f"FSDP::{name}")


def is_profiling() -> bool:
    """Return whether torch's profiler records this thread."""
    return _profiler_enabled()  # type: ignore[no-any-return]


def synchronisation_events() -> Any:
    """Return settings of torch's profiler with which its trace has the waits of streams for events."""
    return _ProfilerConfig(enable_cuda_sync_events=True)
