"""What a step leases, recorded to report it and to plan the steps after it."""

from __future__ import annotations

import weakref

import torch

from shardwright.memory.plan import Item
from shardwright.memory.slab import DYNAMIC, Allocator, Slab


class Recorder:
    """Passes leases on to another allocator and remembers when each slab was leased and released.

    Attributes:
        inner: where the memory comes from.
        ticks: leases and releases so far; the time of a trace.
        continued: whether this is a second step, of which what the first one left is known.
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
        """Forget what was leased and released, not what is leased."""
        self._spans.clear()

    def leases(self, kind: str) -> bool:
        """Whether a slab of this kind is leased now."""
        return any(slab.kind == kind for slab in self._open)

    def next_step(self) -> None:
        """Record the step after this one instead. What is leased now was leased before it began."""
        self.ticks = 0
        self.continued = True
        self._spans.clear()
        for slab in list(self._open):
            self._open[slab] = 0

    def finish(self) -> tuple[list[Item], list[Slab]]:
        """What was recorded of the slabs that there are still. What is leased is taken to be so until the end.

        A slab that the step before had leased, and that this one did not release, needs no place: it has its memory.
        """
        for slab, start in list(self._open.items()):
            if not (self.continued and start == 0):
                self._spans.setdefault(slab, []).append((start, self.ticks + 1))
        spans = {slab: tuple(spans) for slab, spans in self._spans.items() if slab.nbytes}
        return [Item(s.unit, s.kind, s.nbytes, leases) for s, leases in spans.items()], list(spans)
