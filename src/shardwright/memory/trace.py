"""What a step leases, recorded to plan the steps after it."""

from __future__ import annotations

import torch

from shardwright.memory.allocator import Allocator
from shardwright.memory.plan import Item
from shardwright.memory.slab import Slab


class Recorder:
    """Passes leases on to torch's allocator and remembers when each slab was leased and released."""

    def __init__(self) -> None:
        self._tick = 0
        self._slabs: dict[int, Slab] = {}
        self._open: dict[int, int] = {}
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def lease(self, slab: Slab) -> torch.Tensor | None:
        self._tick += 1
        self._slabs[id(slab)] = slab
        self._open[id(slab)] = self._tick
        return None

    def release(self, slab: Slab, memory: torch.Tensor | None) -> None:
        self._tick += 1
        start = self._open.pop(id(slab), 0)
        self._slabs[id(slab)] = slab
        self._spans.setdefault(id(slab), []).append((start, self._tick))

    def finish(self) -> tuple[list[Item], list[Slab]]:
        """What was recorded. What is leased still is taken to be so until the end."""
        for key, start in self._open.items():
            self._spans.setdefault(key, []).append((start, self._tick + 1))
        slabs = [self._slabs[key] for key in self._spans if self._slabs[key].nbytes]
        return [Item(s.unit, s.kind, s.nbytes, tuple(self._spans[id(s)])) for s in slabs], slabs


_: type[Allocator] = Recorder
