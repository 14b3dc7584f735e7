"""Plans of memory: where each slab goes in one block of bytes. Pure: sizes and times in, offsets out.

An *item* is a slab: its bytes, and the intervals of a step in which it is leased. Two items that are leased at the same
time must not overlap. An item has one offset for all of its intervals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

ALIGN = 512  #: bytes; what torch's CUDA allocator aligns to, and enough for any collective


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Item:
    """A slab in the trace of a step.

    Attributes:
        unit, kind: the unit that leases it, and the use.
        nbytes: size in bytes.
        spans: the times when it is leased: first tick, and first tick after. Ordered and not empty.
    """

    unit: str
    kind: str
    nbytes: int
    spans: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return aligned(self.nbytes)


@dataclass(frozen=True)
class Plan:
    """The places of items in one block of ``nbytes`` bytes.

    Attributes:
        items, offsets: each item and its first byte.
        nbytes: size of the block.
        lower_bound: the most bytes that are leased at once; no plan has a smaller block.
        slots: for pools, each slot's offset and size, and its largest unit.
    """

    items: tuple[Item, ...]
    offsets: tuple[int, ...]
    nbytes: int
    lower_bound: int
    slots: tuple[tuple[int, int, str], ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """For JSON: sizes and addresses in bytes, times in leases and releases since the step began."""
        return {
            "nbytes": self.nbytes,
            "lower_bound": self.lower_bound,
            "slots": [{"offset": o, "nbytes": n, "largest_unit": unit} for o, n, unit in self.slots],
            "slabs": [
                {
                    "unit": i.unit,
                    "kind": i.kind,
                    "offset": offset,
                    "nbytes": i.nbytes,
                    "leased": [list(span) for span in i.spans],
                }
                for i, offset in zip(self.items, self.offsets, strict=True)
            ],
        }


def peak(items: Sequence[Item]) -> int:
    """The most bytes, each size aligned, that are leased at once."""
    return max(_sizes_at(items, [start for item in items for start, _ in item.spans]), default=0)


def at_peak(items: Sequence[Item]) -> tuple[list[Item], Item | None]:
    """The items that are leased at the peak, and the last of them to be leased."""
    starts = sorted({start for item in items for start, _ in item.spans})
    best: tuple[int, int] = (0, -1)
    sizes = _sizes_at(items, starts)
    for start, size in zip(starts, sizes, strict=True):
        if size > best[0]:
            best = size, start
    live = [item for item in items if any(start <= best[1] < stop for start, stop in item.spans)]
    last = next((item for item in live if any(start == best[1] for start, _ in item.spans)), None)
    return live, last


def _sizes_at(items: Sequence[Item], ticks: Sequence[int]) -> list[int]:
    changes: dict[int, int] = {}
    for item in items:
        for start, stop in item.spans:
            changes[start] = changes.get(start, 0) + item.size
            changes[stop] = changes.get(stop, 0) - item.size
    sizes: dict[int, int] = {}
    now = 0
    for tick in sorted(changes):
        now += changes[tick]
        sizes[tick] = now
    return [sizes[tick] for tick in ticks]


def most_at_once(items: Sequence[Item]) -> int:
    """The most items that are leased at once."""
    changes = sorted(
        change for item in items for start, stop in item.spans for change in ((start, 1), (stop, -1))
    )
    return max(itertools.accumulate(change for _, change in changes), default=0)


def overlap(one: Item, two: Item) -> bool:
    """Whether both are leased at some time."""
    a, b = one.spans, two.spans
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][0] < b[j][1] and b[j][0] < a[i][1]:
            return True
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return False


def fitting(items: Sequence[Item], count: int) -> list[int]:
    """The items that can use ``count`` slots in turn, so that no two items of a slot are leased at once.

    If two items of a slot are leased at once, the item with the longer lease is left out.
    """
    length = [sum(stop - start for start, stop in item.spans) for item in items]
    chosen = sorted(range(len(items)), key=lambda i: items[i].spans[0])
    while True:
        slots_of_items = (chosen[slot::count] for slot in range(count))
        meet = [
            max(pair, key=lambda k: (length[k], k))
            for slot in slots_of_items
            for pair in _meeting(items, slot)
        ]
        if not meet:
            return sorted(chosen)
        chosen.remove(max(meet, key=lambda k: (length[k], k)))


def _meeting(items: Sequence[Item], chosen: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The pairs of chosen items that are leased at once. A pair may come more than once."""
    events = sorted(
        event for i in chosen for start, stop in items[i].spans for event in ((start, 1, i), (stop, 0, i))
    )
    leased: set[int] = set()
    for _, begins, i in events:
        if begins:
            yield from ((j, i) for j in leased)
            leased.add(i)
        else:
            leased.discard(i)


def slots(items: Sequence[Item], count: int) -> Plan:
    """A pool of ``count`` slots. Items use them in turn, in the order of their first lease.

    Any ``count`` consecutive items have different slots, in forward and in backward. One slot
    is as large as the largest item, and each further one at most as large as the next largest item.
    """
    order = sorted(range(len(items)), key=lambda i: items[i].spans[0])
    members = [[i for place, i in enumerate(order) if place % count == slot] for slot in range(count)]
    offsets = [0] * len(items)
    slots_of_plan: list[tuple[int, int, str]] = []
    offset = 0
    for slot in members:
        if not slot:
            continue
        largest = max(slot, key=lambda i: items[i].size)
        slots_of_plan.append((offset, items[largest].size, items[largest].unit))
        for i in slot:
            offsets[i] = offset
        offset += items[largest].size
    return Plan(tuple(items), tuple(offsets), offset, peak(items), tuple(slots_of_plan))
