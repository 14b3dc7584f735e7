"""Every strategy on meshes of one and two axes, and a selection of them for short tests."""

from __future__ import annotations

import itertools

from tests.engine.kit.places import On, Shape, Stages, on
from tests.support.matrix import everything

STAGES: dict[int, list[Stages]] = {n: list(itertools.product(range(4), repeat=n)) for n in (1, 2)}
SHAPES: dict[int, list[Shape]] = {1: [(1,), (2,), (3,), (4,)], 2: [(2, 2), (1, 2), (2, 1), (4, 1)]}


EVERYWHERE = [On(stages, shape) for n in (1, 2) for stages in STAGES[n] for shape in SHAPES[n]]
#: Each kind of reduction once, and other kinds of step: a test runs on the former and on a third of the latter.
SOME = [
    *on("ddp", (2,)),
    *on("zero1", (2,)),
    *on("zero2", (3,)),
    *on("zero3", (2,)),
    *on("hsdp", (2, 2)),
    *on("hfsdp", (2, 2)),
]
OTHERS = [
    *on("zero1", (2, 2)),
    *on("hsdp", (1, 2)),
    *on("hfsdp", (2, 1)),
    *on("0-2", (2, 2)),
    *on("hsdp", (2, 1)),
    *on("zero3", (2, 2)),
    *on("2-0", (2, 2)),
    *on("zero2", (2, 2)),
    *on("1-2", (2, 2)),
    *on("hfsdp", (1, 2)),
    *on("0-1", (2, 2)),
    *on("3-1", (2, 2)),
]


def some(turn: int) -> list[On]:
    """Where a test runs of which any place shows most; neighbours in the file take turns."""
    return SOME + OTHERS if everything() else SOME + OTHERS[turn::3]
