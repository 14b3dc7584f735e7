"""The search for a small plan: leases of a step in, an offset for each out. Pure, and equal on all ranks."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Sequence

from shardwright.engine.memory.plan import Item, Plan, peak

ALIKE = 0.002  #: relative difference up to which sizes count as equal: a reduction has a few flags beside gradients
CLOSE = 0.001  #: relative excess over the lower bound at which the search ends
FAR = 0.02  #: relative excess above which the search takes three times as long
EFFORT = 8_000_000  #: pairs of items leased together that the search looks at, at most
ORDERS = 1000  #: orders that it tries, at most
TRIES = 5  #: changes of an order in a row that do not help, before the search takes the next order

Numbers = list[int]  #: numbers of items that are alike, in the order of their first lease


def pack(items: Sequence[Item]) -> Plan:
    """Choose an offset for each item so that the block is small.

    This kind of packing is NP-hard. A step has a structure that helps: a model has few kinds of units, and units of a
    kind take turns. So the search does not order items, it orders groups of items that are alike.

    * Items that are leased until after the last lease, such as gradients, hang from the top, in the order of their
      leases. They are called the pile.
    * The groups follow one after another, and the items of a group in the order of their first lease. An item is placed
      into the lowest or the highest gap below the bound, whichever is nearer to its end of the block. So the free
      bytes in the middle stay in one piece.
    * If an item does not fit below the bound, its group moves to an earlier random place in the order. A change that
      makes the excess larger is undone. After a few changes without success the search begins with another order.

    The search ends close to the bound, or after a fixed number of orders, or after a fixed number of pairs of items
    that are leased together. One order looks at each pair twice at most. So its time is linear in the units if they are
    released after forward, and quadratic if they are kept. The random numbers have a fixed seed, so ranks with equal
    leases have equal plans.
    """
    search = _Search(items)
    search.run()
    return Plan(tuple(items), tuple(search.offsets()), search.height, search.bound)


class _Search:
    """The state of a search.

    Attributes:
        bound: the most bytes that are leased at once.
        height: the size of the smallest block so far.
        pairs: number of items and of pairs of items that are leased together, twice; the work of one order.
        orders, effort: number of orders tried, and the work so far.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.bound = peak(items)
        self._items = items
        self._sizes = [item.size for item in items]
        self._rounded = _rounded(self._sizes)
        last = max((item.spans[-1][0] for item in items), default=0)
        piled = [i for i, item in enumerate(items) if len(item.spans) == 1 and item.spans[0][1] > last]
        self._piled = sorted(piled, key=lambda i: items[i].spans)
        self._others = sorted(set(range(len(items))).difference(piled), key=lambda i: items[i].spans)
        #: For each item the height of the pile at the end of its last lease.
        starts = [items[i].spans[0][0] for i in self._piled]
        heights = list(itertools.accumulate((self._sizes[i] for i in self._piled), initial=0))
        self._pile = heights[-1]
        self._above = [heights[bisect.bisect_left(starts, item.spans[-1][1])] for item in items]
        self._meets, self._fullest = self._sweep()
        self._groups = self._group()
        self._random = random.Random(0)
        self.pairs = len(items) + sum(map(len, self._meets))
        self.orders = self.effort = 0
        self._offsets = [0] * len(items)
        #: At first all items are one above the other.
        self._best = [0] * len(items)
        ends = itertools.accumulate(self._sizes[i] for i in self._others)
        for i, end_of_item in zip(self._others, ends, strict=True):
            self._best[i] = end_of_item - self._sizes[i]
        self.height = sum(self._sizes)

    def offsets(self) -> list[int]:
        """The offset of each item in a block of ``height`` bytes."""
        offsets, free = list(self._best), self.height
        for i in self._piled:
            free -= self._sizes[i]
            offsets[i] = free
        return offsets

    def run(self) -> None:
        for order, two_ends in itertools.cycle(itertools.product(self._orders(), (True, False))):
            if self._ends():
                return
            least, high = self._try(order, two_ends)
            failures = 0
            while failures < TRIES:
                if self._ends():
                    return
                changed = self._changed(order, high)
                excess, its_high = self._try(changed, two_ends)
                failures = failures + 1 if excess >= least else 0
                if excess <= least:
                    order, least, high = changed, excess, its_high

    def _ends(self) -> bool:
        excess = self.height - self.bound
        if excess <= CLOSE * self.bound:
            return True
        share = max(self.effort / EFFORT, self.orders / ORDERS)
        return share > (3 if excess > FAR * self.bound else 1)

    # -- what is known before ------------------------------------------------------------------------------------

    def _sweep(self) -> tuple[list[list[int]], list[int]]:
        """For every item outside the pile the other such items that are leased at some time together with it, and the
        most bytes that are leased during its leases."""
        events = sorted(
            event
            for i, item in enumerate(self._items)
            for start, stop in item.spans
            for event in ((start, 1, i), (stop, 0, i))
        )
        outside = set(self._others)
        meets: list[set[int]] = [set() for _ in self._items]
        fullest = [0] * len(self._items)
        leased: set[int] = set()
        now = 0
        for _, begins, i in events:
            now += self._sizes[i] if begins else -self._sizes[i]
            if not begins:
                leased.discard(i)
                continue
            if i in outside:
                meets[i] |= leased
                for j in leased:
                    meets[j].add(i)
                leased.add(i)
            for j in leased:
                fullest[j] = max(fullest[j], now)
        return [sorted(each) for each in meets], fullest

    def _group(self) -> list[Numbers]:
        """Items are alike if they have one kind, about one size, and one lease or several."""
        groups: dict[tuple[int, str, bool], Numbers] = {}
        for i in self._others:
            item = self._items[i]
            groups.setdefault((self._rounded[i], item.kind, len(item.spans) > 1), []).append(i)
        return list(groups.values())

    def _orders(self) -> list[list[Numbers]]:
        """Orders to begin with. Large items come first, in half of the orders after those at the fullest times."""

        def size(group: Numbers) -> int:
            return self._rounded[group[0]]

        def several(group: Numbers) -> bool:
            return len(self._items[group[0]].spans) > 1

        def length(group: Numbers) -> int:
            return max(sum(stop - start for start, stop in self._items[i].spans) for i in group)

        def fullest(group: Numbers) -> int:
            """The largest fullness of the group, in twentieths of the bound."""
            return round(20 * max(self._fullest[i] for i in group) / self.bound)

        keys = (
            lambda group: (-size(group),),
            lambda group: (-size(group) * length(group),),
            lambda group: (-several(group), -size(group)),
            lambda group: (-fullest(group), -size(group)),
            lambda group: (-fullest(group), -several(group), -size(group)),
            lambda group: (-fullest(group), -size(group) * length(group)),
        )
        return [sorted(self._groups, key=key) for key in keys]

    # -- one order -----------------------------------------------------------------------------------------------

    def _changed(self, order: list[Numbers], high: list[Numbers]) -> list[Numbers]:
        """The order after one of the groups ``high`` has moved forward, or anywhere if it was the first."""
        group = high[int(self._random.random() * len(high))]
        place = next(i for i, each in enumerate(order) if each is group)
        rest = order[:place] + order[place + 1 :]
        place = int(self._random.random() * (place or len(order)))
        return [*rest[:place], group, *rest[place:]]

    def _try(self, order: list[Numbers], two_ends: bool) -> tuple[tuple[int, int], list[Numbers]]:
        """Place all items. Returns the height and the sum of all excesses, and the groups above the bound."""
        bound = self.bound
        self.orders += 1
        self._place([i for group in order for i in group], self._rounded, two_ends)
        needs = self._needs()
        excess = max(needs, default=0), sum(need - bound for need in needs if need > bound)
        high = [group for group in order if any(needs[i] > bound for i in group)]
        self._note(excess[0])
        if high:  # then let every item fall as low as possible, from the lowest to the highest
            self._place(sorted(self._others, key=lambda i: (self._offsets[i], i)), self._sizes, False)
            self._note(max(self._needs()))
        return excess, high

    def _needs(self) -> list[int]:
        """For each item outside the pile the height of a block that has room for it and the pile above it. For the
        others the height of the pile, which is at most the bound."""
        needs = [self._pile] * len(self._items)
        for i in self._others:
            needs[i] = self._offsets[i] + self._sizes[i] + self._above[i]
        return needs

    def _note(self, height: int) -> None:
        if height < self.height:
            self._best, self.height = list(self._offsets), height

    def _place(self, order: list[int], sizes: list[int], two_ends: bool) -> None:
        """Place items one after another into the lowest gap, or from both ends."""
        self.effort += self.pairs
        offsets = self._offsets
        ends = [-1] * len(offsets)
        for i in order:
            size, top = sizes[i], self.bound - self._above[i]
            taken = [(offsets[j], ends[j]) for j in self._meets[i] if ends[j] >= 0]
            taken.sort()
            free, low, high = 0, -1, -1
            for start, stop in taken:
                if start - free >= size:
                    if min(start, top) - free >= size:
                        high = min(start, top) - size
                    if low < 0:
                        low = free
                if stop > free:
                    free = stop
            if low < 0:
                low = free
            if top - free >= size:
                high = top - size
            offsets[i] = high if two_ends and high >= low and top - high - size < low else low
            ends[i] = offsets[i] + size


def _rounded(sizes: Sequence[int]) -> list[int]:
    """Each size, or the next larger one that counts as equal."""
    rounded: dict[int, int] = {}
    largest = 0
    for size in sorted(set(sizes), reverse=True):
        if not rounded or size < largest * (1 - ALIKE):
            largest = size
        rounded[size] = largest
    return [rounded[size] for size in sizes]
