"""Searches for the fastest settings beside a look at all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from shardwright.planner import Axis, Found, Keys, Later, fastest, frontier, search_widely
from shardwright.planner.search import search


def grid(sizes: tuple[int, ...], lone: bool = False) -> list[Axis]:
    """Axes of so many values. ``lone``: the first value of the first axis may take little memory."""
    values = [tuple(((f"s.a{n}", str(i)),) for i in range(size)) for n, size in enumerate(sizes)]
    return [Axis(f"a{n}", each, lone and n == 0) for n, each in enumerate(values)]


def at(keys: Keys) -> tuple[int, ...]:
    return tuple(int(value) for _, value in keys)


class Job:
    """Memory and time that fall along each axis, by random steps."""

    def __init__(
        self, draw: random.Random, sizes: tuple[int, ...], orderly: bool = True, lone: bool = False
    ) -> None:
        self.memory = [sorted((draw.randint(0, 100) for _ in range(n)), reverse=True) for n in sizes]
        self.memory[0][0] -= 120 * lone
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

    def plan(self, keys: Keys) -> Later:
        assert at(keys) not in self.planned, "twice"
        self.planned.append(at(keys))
        return lambda: self.found(keys)


@pytest.mark.parametrize("lone", [False, True])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("orderly", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_the_fastest_is_found_with_few_plans(seed: int, orderly: bool, width: int, lone: bool) -> None:
    draw = random.Random(seed)
    sizes = tuple(draw.randint(2, 4) for _ in range(draw.randint(1, 4)))
    job, axes = Job(draw, sizes, orderly, lone), grid(sizes, lone)
    plans = search(axes, job.plan, width)
    everything = [job.found(tuple((f"s.a{n}", str(i)) for n, i in enumerate(p))) for p in job.points]
    best, of_all = fastest(plans), fastest(everything)
    assert (best is None) == (of_all is None)
    if best is not None and of_all is not None and orderly:
        assert best.seconds == of_all.seconds
    if len(job.points) > 60 and width == 1 and not lone:
        assert len(job.planned) - len(job.refused) < 0.6 * len(job.points)
    front = frontier(plans)
    assert [each.seconds for each in front] == sorted(each.seconds for each in front)
    assert [each.nbytes for each in front] == sorted((each.nbytes for each in front), reverse=True)
    assert all(each.fits for each in front) and (not front or front[0].seconds == best.seconds)  # type: ignore[union-attr]


def test_one_wrong_neighbour_is_no_obstacle() -> None:
    """On one axis, where the second value is faster and smaller than the first."""
    times = {0: 2.0, 1: 1.0, 2: 3.0}

    def plan(keys: Keys) -> Later:
        (i,) = at(keys)
        return lambda: Found(keys, True, 10 - i, times[i])

    best = fastest(search(grid((3,)), plan))
    assert best is not None and best.seconds == 1.0


@pytest.mark.parametrize("filling, planned", [(1.1, 4), (2.0, 3)], ids=["a little", "far"])
def test_no_neighbour_that_takes_more_than_a_point_far_above_the_device(filling: float, planned: int) -> None:
    """The first value of the first axis does not fit, which the point with the smaller second value shows."""
    fillings = {(0, 0): filling + 0.1, (0, 1): filling, (1, 0): 0.9, (1, 1): 0.8}
    points: list[tuple[int, ...]] = []

    def plan(keys: Keys) -> Later:
        point = at(keys)
        points.append(point)
        fits = fillings[point] <= 1  # type: ignore[index]
        return lambda: Found(keys, fits, int(100 * fillings[point]), sum(point), filling=fillings[point])  # type: ignore[index]

    best = fastest(search(grid((2, 2)), plan))
    assert best is not None and at(best.keys) == (1, 0)
    assert len(points) == planned and ((0, 0) in points) == (planned == 4)


# -- further settings


class Wide:
    """A grid of two axes. ``t`` divides memory and takes time; ``o`` takes less memory and much time.

    ``speed``: the time with each ``t``, as a multiple. ``slow``: the same of ``o`` 1.
    """

    def __init__(
        self,
        limit: float,
        speed: dict[int, float] | None = None,
        without: tuple[int, ...] = (),
        slow: float = 10,
    ) -> None:
        self.limit, self.without, self.slow = limit, without, slow
        self.speed = {1: 1.0, 2: 1.3, 4: 1.5, 8: 2.0, **(speed or {})}
        self.planned: list[tuple[int, int, int]] = []

    def grids(self, keys: Keys) -> list[list[Axis]]:
        if int(dict(keys).get("t", 1)) in self.without:
            return []
        axes = [Axis(n, tuple(((n, str(i)),) for i in range(3))) for n in "ab"]
        return [[*axes, Axis("further", (keys,))]] if keys else [axes]

    def found(self, keys: Keys) -> Found:
        values = dict(keys)
        a, b, t, o = (
            int(values.get(name, default)) for name, default in zip("abto", (0, 0, 1, 0), strict=True)
        )
        assert t not in self.without or not keys  # the job itself is planned as it is
        nbytes = (24 - 4 * a - 2 * b) / t - 7 * o
        return Found(
            keys, nbytes <= self.limit, round(nbytes), (1 + 0.2 * a + 0.1 * b) * self.speed[t] * self.slow**o
        )

    def plan(self, keys: Keys) -> Later:
        values = {"t": "1", "o": "0", "a": "0", "b": "0", **dict(keys)}
        self.planned.append(tuple(int(values[name]) for name in "toab"))  # type: ignore[arg-type]
        assert len(set(self.planned)) == len(self.planned), "twice"
        return lambda: self.found(keys)

    def search(self, helps: bool = False, width: int = 1, helps_speed: bool = True) -> Found | None:
        """``helps_speed``: ``t`` may make steps faster, too."""

        def likeness(keys: Keys) -> frozenset[tuple[str, str]]:
            return frozenset({"a": "0", "b": "0", "t": "1", "o": "0", **dict(keys)}.items())

        values, slow = [[(("t", str(t)),) for t in (2, 4, 8)]], [(("o", "1"),), (("o", "2"),)]
        further, smaller = (values, []) if helps_speed else ([], values)
        plans = search_widely(self.grids, self.plan, further, smaller, slow, lambda _: helps, width, likeness)
        return fastest(plans)

    @property
    def tried(self) -> list[tuple[int, int]]:
        """The values of ``t`` and ``o`` in the order in which they were tried."""
        return list(dict.fromkeys((t, o) for t, o, _, _ in self.planned))


def test_further_settings_are_not_tried_without_a_reason() -> None:
    job = Wide(limit=16)
    best = job.search()
    assert best is not None and best.nbytes <= 16 and best.seconds == pytest.approx(1.4)
    assert job.tried == [(1, 0)]


def test_if_nothing_fits_the_first_further_setting_that_fits_is_searched() -> None:
    job = Wide(limit=4)  # the smallest point needs 12, 6, 3 and 1.5; with ``o`` 1 it needs 5
    best = job.search()
    assert best is not None and dict(best.keys)["t"] == "4"
    assert best.nbytes <= 4 and best.seconds == pytest.approx(1.5 * 1.4)
    assert job.tried == [(1, 0), (8, 0), (2, 0), (4, 0), (1, 1), (1, 2)] and len(job.planned) <= 11
    refused = Wide(limit=4, without=(2, 8))
    best = refused.search()
    assert best is not None and dict(best.keys)["t"] == "4"
    assert refused.tried == [(1, 0), (4, 0), (1, 1), (1, 2)]


def test_a_job_that_needs_a_further_setting_is_searched_with_it() -> None:
    """As tensor parallelism of more ranks than there are sequences."""
    job = Wide(limit=16, without=(1,))
    best = job.search()
    assert best is not None and dict(best.keys)["t"] == "2" and best.nbytes <= 16
    assert best.seconds == pytest.approx(1.3) and job.tried[0] == (1, 0)


def test_settings_that_only_save_memory_are_not_tried_for_speed() -> None:
    job = Wide(limit=16)
    job.search(helps=True)
    assert (2, 0) in job.tried
    job = Wide(limit=16)
    job.search(helps=True, helps_speed=False)
    assert job.tried == [(1, 0)]
    best = Wide(limit=4).search(helps_speed=False)
    assert best is not None and dict(best.keys)["t"] == "4"


def test_settings_that_are_mostly_slower_win_where_they_are_not() -> None:
    job = Wide(limit=5, slow=1.05)
    best = job.search()
    assert best is not None and dict(best.keys) == {"a": "2", "b": "2", "o": "1"}
    assert best.seconds == pytest.approx(1.6 * 1.05) and job.tried == [(1, 0), (8, 0), (2, 0), (4, 0), (1, 1)]


def test_all_together_come_last() -> None:
    job = Wide(
        limit=-6, speed={8: 1.6}
    )  # with ``o`` 1 the smallest point needs 5, -1, -4 and -5.5, with 2 -2 and less
    assert job.search() is not None
    assert job.tried == [(1, 0), (8, 0), (1, 1), (8, 1), (1, 2), (8, 2), (2, 2)]
    nothing = Wide(limit=-100)
    assert nothing.search() is None and len(nothing.planned) == 7


@pytest.mark.parametrize(
    ("speed", "tried", "t"),
    [
        ({2: 1.2}, [1, 2], "1"),  # its first plan is slower by a fifth
        ({2: 0.9, 4: 0.95}, [1, 2, 4], "2"),
        ({2: 0.9, 4: 0.8, 8: 0.7}, [1, 2, 4, 8], "8"),
        ({2: 1.05}, [1, 2, 4], "2"),  # a little slower, with room for faster settings
    ],
)
def test_further_settings_that_help_are_tried_as_long_as_they_do(
    speed: dict[int, float], tried: list[int], t: str
) -> None:
    job = Wide(limit=12, speed=speed)
    best = job.search(helps=True)
    assert best is not None and dict(best.keys).get("t", "1") == t
    assert job.tried == [(each, 0) for each in tried]
    at_once = Wide(limit=12, speed=speed).search(helps=True, width=3)
    assert at_once is not None and at_once.seconds == best.seconds
