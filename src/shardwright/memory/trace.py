"""What a step leases, recorded to report it and to plan the steps after it."""

from __future__ import annotations

import torch

from shardwright.memory.allocator import Allocator
from shardwright.memory.plan import Item
from shardwright.memory.slab import DYNAMIC, Slab


class Recorder:
    """Passes leases on to another allocator and remembers when each slab was leased and released.

    Attributes:
        inner: where the memory comes from.
        ticks: leases and releases so far; the time of a trace.
    """

    def __init__(self, inner: Allocator = DYNAMIC) -> None:
        self.ticks = 0
        self.inner = inner
        self._slabs: dict[int, Slab] = {}  # by id; kept alive, so that ids stay theirs
        self._open: dict[int, int] = {}
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def lease(self, slab: Slab) -> torch.Tensor | None:
        memory = self.inner.lease(slab)
        self.ticks += 1
        self._slabs[id(slab)] = slab
        self._open[id(slab)] = self.ticks
        return memory

    def release(self, slab: Slab, memory: torch.Tensor | None) -> None:
        self.inner.release(slab, memory)
        self.ticks += 1
        self._spans.setdefault(id(slab), []).append((self._open.pop(id(slab)), self.ticks))

    def finish(self) -> tuple[list[Item], list[Slab]]:
        """What was recorded. What is leased still is taken to be so until the end."""
        for key, start in self._open.items():
            self._spans.setdefault(key, []).append((start, self.ticks + 1))
        slabs = [self._slabs[key] for key in self._spans if self._slabs[key].nbytes]
        return [Item(s.unit, s.kind, s.nbytes, tuple(self._spans[id(s)])) for s in slabs], slabs
