"""Searches for the fastest settings beside a look at all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from shardwright.planner.search import Axis, Found, Keys, fastest, frontier, search


def grid(sizes: tuple[int, ...]) -> list[Axis]:
    return [Axis(f"a{n}", tuple(((f"s.a{n}", str(i)),) for i in range(size))) for n, size in enumerate(sizes)]


def at(keys: Keys) -> tuple[int, ...]:
    return tuple(int(value) for _, value in keys)


class Job:
    """Memory and time that fall along each axis, by random steps."""

    def __init__(self, draw: random.Random, sizes: tuple[int, ...], orderly: bool = True) -> None:
        self.memory = [sorted((draw.randint(0, 100) for _ in range(n)), reverse=True) for n in sizes]
        self.time = [sorted(draw.random() for _ in range(n)) for n in sizes]
        if not orderly:  # two neighbours of one axis are the other way round
            axis = draw.randrange(len(sizes))
            i = draw.randrange(sizes[axis] - 1)
            self.time[axis][i : i + 2] = reversed(self.time[axis][i : i + 2])
        points = list(itertools.product(*map(range, sizes)))
        self.limit = draw.choice([self.nbytes(p) for p in points]) if draw.random() < 0.9 else -1
        self.refused = {p for p in points if draw.random() < 0.1}
        self.points = points
        self.planned: list[tuple[int, ...]] = []

    def nbytes(self, point: tuple[int, ...]) -> int:
        return sum(self.memory[n][i] for n, i in enumerate(point))

    def found(self, keys: Keys) -> Found | None:
        point = at(keys)
        if point in self.refused:
            return None
        seconds = sum(self.time[n][i] for n, i in enumerate(point))
        return Found(keys, self.nbytes(point) <= self.limit, self.nbytes(point), seconds)

    def plan(self, points: Sequence[Keys]) -> list[Found | None]:
        assert not {*map(at, points)} & {*self.planned}, "twice"
        self.planned += map(at, points)
        return [*map(self.found, points)]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("orderly", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_the_fastest_is_found_with_few_plans(seed: int, orderly: bool, width: int) -> None:
    draw = random.Random(seed)
    sizes = tuple(draw.randint(2, 4) for _ in range(draw.randint(1, 4)))
    job, axes = Job(draw, sizes, orderly), grid(sizes)
    plans = search(axes, job.plan, width)
    everything = [job.found(tuple((f"s.a{n}", str(i)) for n, i in enumerate(p))) for p in job.points]
    best, of_all = fastest(plans), fastest(everything)
    assert (best is None) == (of_all is None)
    if best is not None and of_all is not None and orderly:
        assert best.seconds == of_all.seconds
    if len(job.points) > 60 and width == 1:
        assert len(job.planned) - len(job.refused) < 0.6 * len(job.points)
    front = frontier(plans)
    assert [each.seconds for each in front] == sorted(each.seconds for each in front)
    assert [each.nbytes for each in front] == sorted((each.nbytes for each in front), reverse=True)
    assert all(each.fits for each in front) and (not front or front[0].seconds == best.seconds)  # type: ignore[union-attr]


def test_one_wrong_neighbour_is_no_obstacle() -> None:
    """On one axis, where the second value is faster and smaller than the first."""
    times = {0: 2.0, 1: 1.0, 2: 3.0}

    def plan(points: Sequence[Keys]) -> list[Found]:
        return [Found(keys, True, 10 - i, times[i]) for keys in points for i in at(keys)]

    best = fastest(search(grid((3,)), plan))
    assert best is not None and best.seconds == 1.0
