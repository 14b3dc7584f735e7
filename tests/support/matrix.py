"""The rows of a matrix of settings that are run: few that show every pair of settings together, or more if asked for.

``SHARDWRIGHT_MATRIX=all make test-all`` runs whole products, some hours on two cores; ``triples`` runs what shows every
three settings together. ``pairs`` is the default, which `make test-all` uses. ``values``, which `make test` uses, runs
those among them that show every setting. The selection is the same in every run.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["covering", "everything", "generate", "select", "together"]

Row = TypeVar("Row")

STRENGTHS = {"values": 1, "pairs": 2, "triples": 3, "all": None}


def level() -> str:
    """The selection of rows of this run."""
    found = os.environ.get("SHARDWRIGHT_MATRIX", "pairs")
    if found not in STRENGTHS:
        raise ValueError(f"SHARDWRIGHT_MATRIX: expected one of {', '.join(STRENGTHS)}, found {found!r}")
    return found


def everything() -> bool:
    """Whether this run leaves nothing out."""
    return level() == "all"


def select(rows: Iterable[Row], shows: Callable[[Row, int], Iterable[Hashable]]) -> list[Row]:
    """The rows of this run. ``shows(row, strength)`` is what a row shows; see `together`."""
    strength = STRENGTHS[level()]
    if strength is None:
        return list(rows)
    rows = list(rows)
    first: list[int] = []
    for each in range(1, strength + 1):  # a larger selection has the rows of the smaller ones
        first = chosen((shows(row, each) for row in rows), first)
    return [rows[number] for number in first]


def together(strength: int, *settings: Hashable) -> Iterable[Hashable]:
    """Every two (or ``strength``) of a row's settings, each with the place that says what it is a value of."""
    return itertools.combinations(enumerate(settings), strength)


def covering(rows: Sequence[Row], shows: Callable[[Row], Iterable[Hashable]]) -> list[Row]:
    """Few of ``rows``, in their order, that show all that all of them show: the one that adds most, again and again.

    Of those that add as much the first is taken.
    """
    return [rows[number] for number in chosen(map(shows, rows))]


def chosen(shown: Iterable[Iterable[Hashable]], first: Sequence[int] = ()) -> list[int]:
    """The numbers of the rows that `covering` returns, by what each row shows; among them those of ``first``."""
    bits: dict[Hashable, int] = {}  # sets as numbers: some ten thousand rows take a moment, not seconds
    masks = []
    for each in shown:
        masks.append(0)
        for what in each:
            masks[-1] |= bits.setdefault(what, 1 << len(bits))
    found, unseen = list(first), (1 << len(bits)) - 1
    for number in first:
        unseen &= ~masks[number]
    # What a row adds only falls, so the first one whose figure still holds is the best.
    adds = [(-mask.bit_count(), number) for number, mask in enumerate(masks)]
    heapq.heapify(adds)
    while unseen:
        claimed, number = heapq.heappop(adds)
        added = (masks[number] & unseen).bit_count()
        if added == -claimed:
            found.append(number)
            unseen &= ~masks[number]
        elif added:
            heapq.heappush(adds, (-added, number))
    return sorted(found)


Value = tuple[str, int]  #: an axis and the place of a value on it


def generate(
    axes: Mapping[str, Sequence[Any]],
    excluded: Callable[[str, Any, str, Any], bool],
    strength: int,
    more: int = 0,
    tries: int = 8,
) -> list[dict[str, Any]]:
    """Few rows, each a value for every axis, that show every legal ``strength`` values of different axes together.

    For axes whose product is far too large to be listed, which `covering` would need. ``excluded`` says of two axes,
    in their order, each with a value, that no row may have both. What no row can show is left out. ``more`` rows
    follow that show as much as they can of what one value more makes with these. A run of ``values`` has few of the
    rows for pairs, which show every value.
    """
    draw = random.Random(0)
    names = list(axes)
    values: list[Value] = [(name, place) for name in names for place in range(len(axes[name]))]
    alone: dict[Value, set[Value]] = {value: set() for value in values}  # what may not stand beside it
    for one, other in itertools.combinations(values, 2):
        if one[0] != other[0] and excluded(one[0], axes[one[0]][one[1]], other[0], axes[other[0]][other[1]]):
            alone[one].add(other)
            alone[other].add(one)

    def legal(some: Iterable[Value]) -> bool:
        return not any(other in alone[one] for one, other in itertools.combinations(some, 2))

    def all_of(strength: int) -> dict[frozenset[Value], None]:  # an ordered set
        return {
            frozenset(some): None
            for group in itertools.combinations(names, strength)
            for some in itertools.product(*([(name, p) for p in range(len(axes[name]))] for name in group))
            if legal(some)
        }

    def complete(
        start: Iterable[Value], unseen: Mapping[frozenset[Value], None], strength: int
    ) -> set[Value] | None:
        row = set(start)
        taken = {name for name, _ in row}
        for name in draw.sample(names, len(names)):
            if name in taken:
                continue
            free = [value for value in values if value[0] == name and not alone[value] & row]
            if not free:
                return None
            groups = list(itertools.combinations(row, strength - 1))
            shown = [sum(frozenset((*group, value)) in unseen for group in groups) for value in free]
            # Where nothing is left to be shown, the first value: rows are read by those who look for a defect.
            best = [value for value, count in zip(free, shown, strict=True) if count == max(shown)]
            row.add(draw.choice(best) if max(shown) else free[0])
        return row

    def shown_by(
        row: set[Value], unseen: Mapping[frozenset[Value], None], strength: int
    ) -> list[frozenset[Value]]:
        groups = itertools.combinations(sorted(row), strength)
        return [some for some in map(frozenset, groups) if some in unseen]

    rows: list[set[Value]] = []

    def cover(strength: int, most: int | None) -> None:
        unseen = all_of(strength)
        for row in rows:
            for some in shown_by(row, unseen, strength):
                del unseen[some]
        while unseen and (most is None or most > 0):
            first = next(iter(unseen))
            found = [
                row for _ in range(tries) if (row := complete(sorted(first), unseen, strength)) is not None
            ]
            if not found:
                del unseen[first]  # each is legal, and some axis has no value for all of them
                continue
            rows.append(max(found, key=lambda row: len(shown_by(row, unseen, strength))))
            for some in shown_by(rows[-1], unseen, strength):
                del unseen[some]
            most = None if most is None else most - 1

    cover(strength, None)
    cover(strength + 1, more)
    if strength == 2 and level() == "values":
        rows = covering(rows, lambda row: row)
    return [
        {name: axes[name][place] for name, place in sorted(row, key=lambda v: names.index(v[0]))}
        for row in rows
    ]
