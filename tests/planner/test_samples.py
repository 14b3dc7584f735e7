"""Statistics of repeated measurements."""

from __future__ import annotations

import pytest

from shardwright.planner.samples import difference, least_squares, steady


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
