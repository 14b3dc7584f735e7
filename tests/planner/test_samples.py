"""Statistics of measurements: of repeated ones, and of those that others predict."""

from __future__ import annotations

import random
import statistics

import pytest

from shardwright.planner import difference, errors_of_least_squares, least_squares, steady, typical, width
from shardwright.planner.samples import LEAST, without_each


def test_steady_times_and_their_differences() -> None:
    assert steady([3.0]) == 3.0 and difference([3.0]) == 0
    assert steady([1.0, 1.0, 1.0, 9.0]) == 1.0  # one measurement with another program beside it
    assert difference([1.0, 1.0, 1.0, 1.0, 9.0]) == 0
    assert difference([1.0, 1.1, 1.2]) == pytest.approx(0.05 / 1.1)


@pytest.mark.parametrize(
    ("one", "other", "found"), [(2e-5, 1e-4, (2e-5, 1e-4)), (2e-5, 0.0, (2e-5, 0.0)), (3e-5, -1e-5, None)]
)
def test_the_host_by_least_squares(one: float, other: float, found: tuple[float, float] | None) -> None:
    counts = [(100, 7), (400, 19), (400, 8), (350, 30)]
    rows = [(a, b, one * a + other * b) for a, b in counts]
    fitted = least_squares(rows)
    if found is not None:
        assert fitted == (pytest.approx(found[0]), pytest.approx(found[1], abs=1e-9))
    assert min(fitted) >= 0
    assert least_squares([(a, 0, one * a) for a, _ in counts]) == (pytest.approx(one), 0.0)


def test_steady_times_of_operations_add_up_to_that_of_a_step() -> None:
    draw = random.Random(0)
    steps = [[draw.lognormvariate(0, 0.1) for _ in range(200)] for _ in range(25)]
    operations = list(zip(*steps, strict=True))
    step = steady([sum(each) for each in steps])
    # The median of a lognormal time is half a variance, 0.5%, below its mean, and a step is near the mean of its parts.
    assert sum(map(steady, operations)) == pytest.approx(step, rel=0.01)
    lower = sum(statistics.quantiles(each, n=4, method="inclusive")[0] for each in operations)
    assert lower < 0.95 * statistics.quantiles([sum(each) for each in steps], n=4)[0]


def test_errors_of_rows_that_the_others_predict() -> None:
    counts = [(100, 7), (400, 19), (400, 8), (350, 30)]
    rows = [(a, b, 2e-5 * a + 1e-4 * b) for a, b in counts]
    assert errors_of_least_squares(rows) == pytest.approx([0.0] * 4, abs=1e-9)
    one_slow = [*rows, (200, 10, 2 * (2e-5 * 200 + 1e-4 * 10))]
    assert errors_of_least_squares(one_slow)[-1] == pytest.approx(1.0)
    assert errors_of_least_squares(rows[:1]) == [] == errors_of_least_squares([(1, 1, 0.0)] * 3)


def test_the_width_of_a_range() -> None:
    assert list(without_each("abc")) == [("a", ["b", "c"]), ("b", ["a", "c"]), ("c", ["a", "b"])]
    assert list(without_each("a")) == []
    assert typical([]) == 0 and typical([0.3]) == 0.3
    assert typical([0.1, 0.2, 0.3, 9.0]) == pytest.approx(0.3)  # one that is far off does not count
    assert width([], []) == width([0.01], []) == LEAST
    assert width([0.03, 0.03, 0.5], [0.04, 0.04]) == pytest.approx(0.05)
