"""The memory that this process and its device use."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import psutil
import torch


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that are used, and the total that exists.

    CUDA: peak bytes of tensors (active) and of the allocator (reserved) since the last measurement; total is the
    device's memory. CPU: bytes of the process now (active) and at its peak (reserved); total is the machine's memory.
    """

    active: int
    reserved: int
    total: int


def measure_memory(device: torch.device) -> MemoryUse:
    """Return this process's memory. On CUDA this resets the peaks."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        torch.cuda.reset_peak_memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        return MemoryUse(
            stats.get("active_bytes.all.peak", 0), stats.get("reserved_bytes.all.peak", 0), total
        )
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    now = psutil.Process().memory_info().rss
    return MemoryUse(now, max(now, peak), psutil.virtual_memory().total)
