"""Curves of a run with few points: each part of a curve keeps its least and its largest value, so no spike is lost."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[int, float]


def thinned(points: Sequence[Point], most: int) -> list[list[float]]:
    """At most so many of the points, with six digits; the first and the last one are among them."""
    kept = list(points)
    if len(kept) > most:
        inner, parts = kept[1:-1], max(1, (most - 2) // 2)
        kept = kept[:1]
        for number in range(parts):
            part = inner[number * len(inner) // parts : (number + 1) * len(inner) // parts]
            ends = {min(part, key=_value), max(part, key=_value)}
            kept += sorted(ends)
        kept.append(points[-1])
    return [[step, float(f"{value:.6g}")] for step, value in kept]


def _value(point: Point) -> float:
    return point[1]
