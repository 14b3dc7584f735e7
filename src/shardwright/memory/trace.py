"""What a step leases, recorded to report it and to plan the steps after it."""

from __future__ import annotations

import weakref

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
        self._open: weakref.WeakKeyDictionary[Slab, int] = weakref.WeakKeyDictionary()
        self._spans: weakref.WeakKeyDictionary[Slab, list[tuple[int, int]]] = weakref.WeakKeyDictionary()

    def lease(self, slab: Slab) -> torch.Tensor | None:
        memory = self.inner.lease(slab)
        self.ticks += 1
        self._open[slab] = self.ticks
        return memory

    def release(self, slab: Slab, memory: torch.Tensor | None) -> bool | None:
        lasting = self.inner.release(slab, memory)
        self.ticks += 1
        self._spans.setdefault(slab, []).append((self._open.pop(slab), self.ticks))
        return lasting

    def restart(self) -> None:
        """Forget what was leased and released, not what is leased."""
        self._spans.clear()

    def finish(self) -> tuple[list[Item], list[Slab]]:
        """What was recorded of the slabs that there are still. What is leased is taken to be so until the end."""
        for slab, start in list(self._open.items()):
            self._spans.setdefault(slab, []).append((start, self.ticks + 1))
        spans = {slab: tuple(spans) for slab, spans in self._spans.items() if slab.nbytes}
        return [Item(s.unit, s.kind, s.nbytes, found) for s, found in spans.items()], list(spans)
