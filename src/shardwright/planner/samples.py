"""Statistics of repeated measurements. Nothing here knows what was measured, or imports torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def steady(seconds: Sequence[float]) -> float:
    """The time of repeated measurements: their lower quartile, since other programs only make them longer."""
    return _quartiles(seconds)[0]


def difference(seconds: Sequence[float]) -> float:
    """The width of the middle half of repeated measurements: half of it, as a part of the median."""
    low, middle, high = _quartiles(seconds)
    return (high - low) / 2 / middle


def _quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    if len(seconds) == 1:
        return (seconds[0],) * 3
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, middle, high


def least_squares(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """The factors of the first two columns with which their sums are nearest to the third one, relative to it. None is
    negative."""
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
