"""Which rows of a matrix of settings are run: few that show every pair of settings together, or more if asked for.

``SHARDWRIGHT_MATRIX=all make test`` runs whole products, some hours on two cores; ``triples`` runs what shows every
three settings together; ``pairs`` is the default. The selection is the same in every run.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

__all__ = ["covering", "everything", "select", "together"]

Row = TypeVar("Row")

STRENGTHS = {"pairs": 2, "triples": 3, "all": None}


def everything() -> bool:
    """Whether this run leaves nothing out."""
    return os.environ.get("SHARDWRIGHT_MATRIX") == "all"


def select(rows: Iterable[Row], shows: Callable[[Row, int], Iterable[Hashable]]) -> list[Row]:
    """The rows of this run. ``shows(row, strength)`` is what a row shows; see `together`."""
    level = os.environ.get("SHARDWRIGHT_MATRIX", "pairs")
    if level not in STRENGTHS:
        raise ValueError(f"SHARDWRIGHT_MATRIX: expected one of {', '.join(STRENGTHS)}, found {level!r}")
    strength = STRENGTHS[level]
    return list(rows) if strength is None else covering(list(rows), lambda row: shows(row, strength))


def together(strength: int, *settings: Hashable) -> Iterable[Hashable]:
    """Every two (or ``strength``) of a row's settings, each with the place that says what it is a value of."""
    return itertools.combinations(enumerate(settings), strength)


def covering(rows: Sequence[Row], shows: Callable[[Row], Iterable[Hashable]]) -> list[Row]:
    """Few of ``rows``, in their order, that show all that all of them show: the one that adds most, again and again.

    Of those that add as much the first is taken.
    """
    bits: dict[Hashable, int] = {}  # sets as numbers: some ten thousand rows take a moment, not seconds
    masks = [0] * len(rows)
    for number, row in enumerate(rows):
        for what in shows(row):
            masks[number] |= bits.setdefault(what, 1 << len(bits))
    chosen, unseen = [], (1 << len(bits)) - 1
    # What a row adds only falls, so the first one whose figure still holds is the best.
    adds = [(-mask.bit_count(), number) for number, mask in enumerate(masks)]
    heapq.heapify(adds)
    while unseen:
        claimed, number = heapq.heappop(adds)
        added = (masks[number] & unseen).bit_count()
        if added == -claimed:
            chosen.append(number)
            unseen &= ~masks[number]
        elif added:
            heapq.heappush(adds, (-added, number))
    return [rows[number] for number in sorted(chosen)]
