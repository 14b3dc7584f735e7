"""Records the leases of a step, for reports and for the plan of later steps."""

from __future__ import annotations

import weakref

import torch

from shardwright.engine.memory.plan import Item
from shardwright.engine.memory.slab import DYNAMIC, Allocator, Slab


class LeaseRecorder:
    """Passes leases to another allocator, and records when each slab was leased and released.

    Attributes:
        inner: the allocator that gives the memory.
        ticks: number of leases and releases so far; the time of a trace.
        continued: whether this is the second step, so that slabs that the first step left leased are known.
    """

    def __init__(self, inner: Allocator = DYNAMIC) -> None:
        self.ticks = 0
        self.inner = inner
        self.continued = False
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
        """Forget past leases and releases. Slabs that are leased now stay recorded."""
        self._spans.clear()

    def leases(self, kind: str) -> bool:
        """Whether a slab of this kind is leased now."""
        return any(slab.kind == kind for slab in self._open)

    def next_step(self) -> None:
        """Record the next step instead. Slabs that are leased now were leased before it began."""
        self.ticks = 0
        self.continued = True
        self._spans.clear()
        for slab in list(self._open):
            self._open[slab] = 0

    def record(self) -> tuple[list[Item], list[Slab]]:
        """The record so far, of the slabs that still exist. A slab that is leased now counts as leased until the end.

        A slab that the step before leased and this step did not release has its memory, so it needs no place.
        """
        spans = {slab: tuple(spans) for slab, spans in self._spans.items() if slab.nbytes}
        for slab, start in self._open.items():
            if slab.nbytes and not (self.continued and start == 0):
                spans[slab] = (*spans.get(slab, ()), (start, self.ticks + 1))
        return [Item(s.unit, s.kind, s.nbytes, leases) for s, leases in spans.items()], list(spans)
