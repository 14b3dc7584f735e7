"""A search for the fastest settings that fit, with few plans.

Settings are points of a grid. The values of an axis are in an order in which both memory and speed fall, as far as
known: a point that fits makes all points after it needless, and one that does not fit all points before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Keys = tuple[tuple[str, str], ...]
"""Keys of a configuration, as SECTION.KEY, and the texts of their values."""
Point = tuple[int, ...]


class Axis(NamedTuple):
    """A setting, with its values in order: each takes no more memory than the one before, and is hardly faster."""

    name: str
    values: tuple[Keys, ...]


class Found(NamedTuple):
    """The plan of one point.

    Attributes:
        keys: the settings of the point.
        fits: whether it fits.
        nbytes: reserved bytes.
        seconds: of a step.
    """

    keys: Keys
    fits: bool
    nbytes: int
    seconds: float


def search(
    axes: Sequence[Axis], plan: Callable[[Sequence[Keys]], Iterable[Found | None]], width: int = 1
) -> list[Found]:
    """Plans of points, among them the fastest that fits if the order of the values holds; in the order of planning.

    The neighbours of the fastest point are planned too, so that it is not missed where an order does not hold by one
    value.

    Args:
        axes: the grid.
        plan: makes the plans of several points; None where settings do not go together.
        width: points that are planned at a time.
    """
    sizes = [len(axis.values) for axis in axes]
    unknown = set(itertools.product(*map(range, sizes)))
    found: dict[Point, Found | None] = {}

    def keys_of(point: Point) -> Keys:
        return tuple(pair for axis, i in zip(axes, point, strict=True) for pair in axis.values[i])

    def visit(points: Sequence[Point]) -> None:
        for point, result in zip(points, plan([*map(keys_of, points)]), strict=True):
            found[point] = result
            unknown.discard(point)
            if result is not None:
                unknown.difference_update(
                    {p for p in unknown if (_after(p, point) if result.fits else _after(point, p))}
                )

    while unknown:
        visit(_dividing(unknown, width))
    while (best := fastest(found.values())) is not None:
        at = next(point for point, each in found.items() if each is best)
        near = [
            (*at[:i], at[i] + step, *at[i + 1 :])
            for i in range(len(at))
            for step in (1, -1)
            if 0 <= at[i] + step < sizes[i]
        ]
        new = [point for point in near if point not in found]
        if not new:
            break
        visit(new)
    return [each for each in found.values() if each is not None]


def fastest(plans: Iterable[Found | None]) -> Found | None:
    """The fastest plan that fits; None: none does."""
    fitting = [each for each in plans if each is not None and each.fits]
    return min(fitting, key=lambda each: each.seconds, default=None)


def frontier(plans: Sequence[Found]) -> list[Found]:
    """The plans that fit and for which no other is both faster and smaller, the fastest first."""
    kept: list[Found] = []
    for each in sorted((each for each in plans if each.fits), key=lambda each: (each.seconds, each.nbytes)):
        if not kept or each.nbytes < kept[-1].nbytes:
            kept.append(each)
    return kept


def _after(one: Point, other: Point) -> bool:
    """Whether a point takes no more memory than the other one."""
    return all(a >= b for a, b in zip(one, other, strict=True))


def _dividing(unknown: set[Point], width: int) -> list[Point]:
    """Points whose plans decide most points in the worse case. None of them decides another one."""

    def decides(point: Point) -> tuple[int, Point]:
        after = sum(_after(each, point) for each in unknown)
        before = sum(_after(point, each) for each in unknown)
        return min(after, before), tuple(-i for i in point)

    chosen: list[Point] = []
    for point in sorted(unknown, key=decides, reverse=True):
        if not any(_after(point, each) or _after(each, point) for each in chosen):
            chosen.append(point)
            if len(chosen) == width:
                break
    return chosen
