"""Statistics of measurements: of repeated ones, and of those that others predict. Nothing here imports torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
LEAST = 0.02  #: the smallest range


def steady(seconds: Sequence[float]) -> float:
    """Return the time of repeated measurements: their median.

    A step's time is the sum of its operations' times, and medians nearly add up. Lower quartiles do not: operations are
    never all fast in the same step, so the sum of their lower quartiles is below the lower quartile of steps.
    """
    return statistics.median(seconds)


def difference(seconds: Sequence[float]) -> float:
    """Return the width of the middle half of repeated measurements: half of it, as a part of the median."""
    if len(seconds) == 1:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / middle


def least_squares(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the factors of the first two columns with which their sums are nearest to the third one, relative to it.

    None is negative.
    """
    rows = [(a / c, b / c, 1.0) for a, b, c in rows if c > 0]
    aa, bb, ab = (sum(x * y for x, y in each) for each in (
        [(a, a) for a, _, _ in rows], [(b, b) for _, b, _ in rows], [(a, b) for a, b, _ in rows]
    ))  # fmt: skip
    ac, bc = sum(a for a, _, _ in rows), sum(b for _, b, _ in rows)
    alone = (ac / aa if aa else 0.0), 0.0
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        return alone
    one, other = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
    if one < 0:
        return 0.0, bc / bb
    return (one, other) if other >= 0 else alone


def errors_of_least_squares(rows: Sequence[tuple[float, float, float]]) -> list[float]:
    """Return the errors with which the factors of all other rows predict the sum of each row."""
    errors = []
    for (a, b, c), others in without_each(rows):
        one, other = least_squares(others)
        if c > 0 and (predicted := a * one + b * other) > 0:
            errors.append(error(predicted, c))
    return errors


def without_each(items: Sequence[T]) -> Iterator[tuple[T, list[T]]]:
    """Yield each item, with all others. Nothing for a single item."""
    if len(items) > 1:
        yield from ((item, [*items[:i], *items[i + 1 :]]) for i, item in enumerate(items))


def error(predicted: float, measured: float) -> float:
    """Return the part by which the larger one of two times is above the other."""
    return max(predicted / measured, measured / predicted) - 1


def typical(errors: Sequence[float]) -> float:
    """Return the error that two of three are not above; 0 if there are none."""
    if len(errors) < 2:
        return sum(errors)
    return statistics.quantiles(errors, n=3, method="inclusive")[1]


def width(differences: Sequence[float], errors: Sequence[float]) -> float:
    """Return the range of a kind of times, as a part of them: the median difference of repeated measurements together
    with the typical error of predictions, as if they were independent."""
    of_repeated = statistics.median(differences) if differences else 0.0
    return max(LEAST, math.hypot(of_repeated, typical(errors)))
