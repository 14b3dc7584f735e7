"""A device from measurements: its times, and the ranges that these have in plans. Nothing is measured here."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.planner.samples import LEAST
from shardwright.train.planning.measured_device import Summary, summary
from shardwright.train.planning.small_jobs import Task

NO_JOBS = Task((), (), ())
SIZES = [4.0**i for i in range(4, 12)]


def device(slower: float = 1.0, noise: float = 0.0) -> Summary:
    """The device of two ranks. Every second size is slower than the others, and repeated measurements differ."""

    def times(seconds: float, number: int) -> list[float]:
        return [seconds * (slower if number % 2 else 1.0) * (1 + noise * i) for i in (-1, 0, 1)]

    def of_sizes(exponent: float) -> list[tuple[float, list[float]]]:
        return [(size, times(1e-9 * size**exponent, i)) for i, size in enumerate(SIZES)]

    rank: dict[str, Any] = {
        "kernels": [
            *(["add float32 2:=,=", [size], seconds] for size, seconds in of_sizes(1)),
            *(["mm float32", [1, 64, 64, size], seconds] for size, seconds in of_sizes(1)),
            *(["attention float32", [1, size, 1, 32], seconds] for size, seconds in of_sizes(1)),
        ],
        "collectives": [
            [name, size, seconds]
            for name in ("gather", "scatter", "reduce")
            for size, seconds in of_sizes(0.5)
        ],
        "steps": [],
    }
    return summary([rank, rank], NO_JOBS, 2, "cpu")


def test_times_that_others_predict_have_the_range_of_repeated_measurements() -> None:
    exact, noisy = device(), device(noise=0.1)
    for name in ("products", "attention", "memory"):
        assert exact.measured.spread[name] == LEAST and exact.differences[name] == 0
        assert noisy.measured.spread[name] == pytest.approx(noisy.differences[name], rel=0.02)
        assert noisy.differences[name] > LEAST
    assert exact.measured.kernels == noisy.measured.kernels  # the middle of three


def test_times_that_others_do_not_predict_have_a_wider_range() -> None:
    ranges = [device(slower).measured.spread for slower in (1.0, 1.2, 1.5)]
    for name in ("products", "attention", "memory", "links"):
        assert ranges[0][name] < ranges[1][name] < ranges[2][name]
    # Halfway between two that take as long a byte, every second one takes 1.5 times as long.
    assert ranges[2]["memory"] == pytest.approx(0.5, abs=0.01)
    # They say nothing about how steady this machine is, for which nothing is written.
    assert max(device(1.5).differences.values()) == 0
