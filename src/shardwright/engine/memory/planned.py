"""An allocator that follows a plan. If the program does not follow it, leases come from torch's allocator."""

from __future__ import annotations

import bisect
import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch

from shardwright.engine.memory.plan import Plan
from shardwright.engine.memory.slab import DYNAMIC, Slab


class LeaseObserver(Protocol):
    """The maker of a plan. It hears of leases outside the plan."""

    def wants(self, slab: Slab) -> bool:
        """Whether a slab that has no place in the plan should have one."""

    def tell(self, unit: str, kind: str, reason: str) -> None:
        """A lease outside the plan, the first for this unit and reason. May raise."""


class Planned:
    """Leases slabs at the places of a plan, in one block of bytes on the slabs' device.

    A slab gets its place only while no lease overlaps it. Otherwise, or if the plan has no place for the slab, torch's
    allocator gives the memory, and the lease is counted. References to the slabs and to the watcher are weak, because
    these refer to this object.

    Attributes:
        plan: the places of the slabs.
        block: the memory, uint8.
        planned, dynamic: number of leases of either kind so far.
        deviations: for each unit, kind and reason the number of dynamic leases.
    """

    def __init__(
        self, plan: Plan, slabs: Sequence[Slab], block: torch.Tensor, watcher: LeaseObserver
    ) -> None:
        self.plan = plan
        self.block = block
        self.planned = self.dynamic = 0
        self.deviations: Counter[tuple[str, str, str]] = Counter()
        self._watcher = weakref.ref(watcher)
        self._places = weakref.WeakKeyDictionary({slab: i for i, slab in enumerate(slabs)})
        ends = [(o, o + item.size) for o, item in zip(plan.offsets, plan.items, strict=True)]
        #: For each slab a mask: one bit for each slab whose place overlaps its place, itself included.
        self._overlaps = _overlaps(ends)
        #: Each slab's memory. None if the plan has fewer bytes for it than it needs.
        self._memory = [
            self.block[start : start + slab.nbytes]
            if slab.nbytes <= item.nbytes and start + slab.nbytes <= plan.nbytes
            else None
            for (start, _), slab, item in zip(ends, slabs, plan.items, strict=True)
        ]
        self._leased = 0  #: one bit for each slab

    def lease(self, slab: Slab) -> torch.Tensor | None:
        i = self._places.get(slab)
        if i is None:
            watcher = self._watcher()
            if watcher is not None and watcher.wants(slab):
                self._deviate(slab, "it is not in the plan")
            return DYNAMIC.lease(slab)
        memory = self._memory[i]
        if memory is None:
            self._deviate(
                slab,
                f"it has {slab.nbytes:,} bytes, but the plan has {self.plan.items[i].nbytes:,} bytes for it",
            )
            return DYNAMIC.lease(slab)
        # The slab's own bit does not count: it is set only if an exception interrupted an earlier lease or release.
        busy = self._overlaps[i] & self._leased & ~(1 << i)
        if busy:
            other = self.plan.items[busy.bit_length() - 1]
            self._deviate(slab, f"its place in the plan still holds the {other.kind} of unit {other.unit!r}")
            return DYNAMIC.lease(slab)
        self._leased |= 1 << i
        self.planned += 1
        return memory

    def release(self, slab: Slab, memory: torch.Tensor | None) -> bool:
        i = self._places.get(slab)
        if i is None or memory is None or memory is not self._memory[i]:
            return False
        self._leased &= ~(1 << i)
        return True

    def _deviate(self, slab: Slab, reason: str) -> None:
        if not slab.nbytes:
            return
        key = slab.unit, slab.kind, reason
        self.dynamic += 1
        self.deviations[key] += 1
        watcher = self._watcher()
        if watcher is not None and self.deviations[key] == 1:
            watcher.tell(*key)


def _overlaps(places: Sequence[tuple[int, int]]) -> list[int]:
    """For each range of bytes a mask of the ranges that overlap it. Takes O(n log n) steps of Python for n ranges."""
    starts = sorted((start, i) for i, (start, _) in enumerate(places))
    stops = sorted((stop, i) for i, (_, stop) in enumerate(places))
    begun, ended = (
        list(itertools.accumulate((1 << i for _, i in order), operator.or_, initial=0))
        for order in (starts, stops)
    )
    return [
        begun[bisect.bisect_left(starts, (stop, -1))] & ~ended[bisect.bisect_left(stops, (start + 1, -1))]
        for start, stop in places
    ]
