"""Modules as people write them (tests/engine/cases), against the plain model: each behaviour under many settings.

Which settings a behaviour meets is said in `shows`; tests/support/matrix.py tells how to run more of them.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import re
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import pytest

from tests.engine.cases import CASES
from tests.engine.cases.running import Place, run
from tests.engine.kit.places import on
from tests.support import CaseFailed, WorkerPools
from tests.support.matrix import covering, select, together

ACCUMULATIONS = ("single", "communicate", "hold", "late")
PRECISIONS = ("fp32", "bf16")
RESHARDS = (None, True, False)


USUAL = [Place(at, "per_parameter") for at in on("zero3", (2,))]
#: About each third one on four ranks, which take longest.
OTHERS = [
    Place(at, layout)
    for name, shape, layout in (
        ("zero3", (2,), "row"),
        ("zero2", (3,), "per_parameter"),
        ("hsdp", (2, 2), "per_parameter"),
        ("zero1", (2,), "per_parameter"),
        ("hfsdp", (1, 2), "element"),
        ("hfsdp", (2, 2), "row"),
        ("ddp", (2,), "per_parameter"),
        ("zero3", (3,), "per_parameter"),
        ("zero3", (2, 2), "row"),
        ("zero3", (3,), "blocks"),
        ("zero3", (2, 2), "per_parameter"),
        ("hsdp", (1, 2), "row"),
        ("zero2", (2,), "blocks"),
        ("hfsdp", (2, 2), "per_parameter"),
        ("zero1", (3,), "element"),
        ("zero3", (2,), "element"),
        ("0-2", (2, 2), "row"),
        ("hsdp", (2, 1), "per_parameter"),
        ("ddp", (3,), "row"),
        ("zero1", (2, 2), "row"),
        ("zero3", (3,), "element"),
        ("hfsdp", (2, 1), "blocks"),
        ("2-3", (2, 2), "per_parameter"),
        ("zero2", (2,), "row"),
        ("3-0", (2, 1), "element"),
        ("hsdp", (2, 2), "element"),
        ("zero1", (2,), "blocks"),
        ("zero3", (1, 2), "row"),
        ("3-1", (2, 2), "blocks"),
        ("1-2", (2, 1), "per_parameter"),
        ("zero3", (2,), "blocks"),
        ("hfsdp", (2, 2), "element"),
        ("zero2", (3,), "element"),
        ("ddp", (2,), "blocks"),
        ("0-1", (2, 2), "per_parameter"),
        ("zero1", (3,), "row"),
        ("zero3", (3,), "row"),
    )
    for at in on(name, shape)
]


class Row(NamedTuple):
    accumulation: str
    precision: str
    reshard: bool | None
    place: Place


def every_row(name: str) -> list[Row]:
    """Everything at the usual places, and every other place twice; shuffled, so that a selection is a mixture, with
    what few ranks can show before the rest."""
    shift = list(CASES).index(name)
    precisions = CASES[name].precisions
    rows = [*itertools.starmap(Row, itertools.product(ACCUMULATIONS[:3], precisions, RESHARDS, USUAL))]
    for i, place in enumerate(2 * OTHERS, shift):
        accumulation, precision = ACCUMULATIONS[i % 4], precisions[i // 4 % len(precisions)]
        rows.append(Row(accumulation, precision, RESHARDS[i % 3], place))
    random.Random(name).shuffle(rows)
    return sorted(rows, key=lambda row: math.prod(row.place.at.shape))


def settings_of(row: Row) -> tuple[Hashable, ...]:
    return row.accumulation, row.precision, row.reshard, row.place.at, row.place.layout


def kind_of(name: str) -> str:
    """The kind of a behaviour, by which the names of its cases begin."""
    return re.split("[:,]", name)[0]


def shows(case_: tuple[str, Row], strength: int) -> Iterator[Hashable]:
    """Each setting, and each kind of behaviour once. Of two settings every pair for some behaviour, and each behaviour
    once. Of three every triple for some, and for each behaviour every pair of some settings: 30 times as many rows."""
    name, row = case_
    yield from together(strength, *settings_of(row))
    mine = (row.accumulation, row.precision, row.reshard, row.place in USUAL)
    for settings in together(strength - 1, *mine) if strength > 2 else [()]:
        yield (name if strength > 1 else kind_of(name)), settings


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Here, so that it is the one who collects that selects, and not every worker."""
    if metafunc.function.__name__ == "test_behaviour_equals_the_plain_model":
        chosen = select([(name, row) for name in CASES for row in every_row(name)], shows)
        ids = [f"{name}-{'-'.join(map(str, row))}" for name, row in chosen]
        metafunc.parametrize(("name", "row"), chosen, ids=ids)


@pytest.mark.multirank
def test_behaviour_equals_the_plain_model(worker_pools: WorkerPools, name: str, row: Row) -> None:
    ranks = math.prod(row.place.at.shape)
    try:
        worker_pools.run(run_row, ranks, name=name, row=row, timeout=20.0)
    except CaseFailed as failure:
        pytest.fail(str(failure), pytrace=False)


def run_row(rank: int, world_size: int, name: str, row: Row) -> None:
    os.environ["SHARDWRIGHT_POISON"] = "1"
    run(CASES[name], rank, world_size, *row)


@pytest.mark.extensive("it tests the cases, not the engine")
@pytest.mark.parametrize("name", CASES)
def test_the_cases_themselves(name: str) -> None:
    """A plain model in the place of the sharded one passes: a failure above is the engine's."""
    run(CASES[name], 0, 1, "communicate", "fp32", None, None)


def test_rows_cover_what_they_say() -> None:
    every = [(name, row) for name in CASES for row in every_row(name)]
    chosen = covering(every, lambda case_: shows(case_, 2))
    assert {name for name, _ in chosen} == set(CASES)
    for one, two in itertools.combinations(range(5), 2):
        there, seen = (
            {(settings_of(row)[one], settings_of(row)[two]) for _, row in rows} for rows in (every, chosen)
        )
        assert seen == there, there - seen
    assert {row.place for _, row in chosen} == {*USUAL, *OTHERS}
    assert {row.accumulation for _, row in chosen} == set(ACCUMULATIONS)
    for setting in range(3):  # none is rare
        counts = Counter(row[setting] for _, row in chosen)
        assert min(counts.values()) > len(chosen) / 10, counts
