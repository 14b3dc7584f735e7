"""A search for the fastest settings that fit, with few plans.

Settings are points of a grid. The values of an axis are in an order in which both memory and speed fall, as far as
known: a point that fits makes all points after it needless, and one that does not fit all points before it. Settings
that are rarely of use are tried only if there is a reason. Nothing here knows the settings.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

Keys = tuple[tuple[str, str], ...]
"""Keys of a configuration, as SECTION.KEY, and the texts of their values."""
Point = tuple[int, ...]
Later = Callable[[], "Found | None"]
"""A function that waits for a plan and returns it, or None if the settings do not go together."""
Plan = Callable[[Keys], Later]
"""Begins the plan of some settings."""
#: Plans that are made at a time if nobody says how many: more of them are often plans that others make needless.
MOST_AT_A_TIME = 4
NEAR = (
    1.1  #: times the time of the fastest settings, up to which others may become faster with the rest changed
)


#: Times the device's room that a plan needs, from which on no point that takes more memory by the order of the values
#: is planned, not even beside the fastest one.
FAR = 1.2


class Axis(NamedTuple):
    """A setting, with its values in order: each takes no more memory than the one before, and is hardly faster.

    Attributes:
        name: of the setting.
        values: in order.
        lone: whether the first value may take less memory than others, too.
    """

    name: str
    values: tuple[Keys, ...]
    lone: bool = False


class Found(NamedTuple):
    """The plan of one point.

    Attributes:
        keys: the settings of the point.
        fits: whether it fits, with room.
        nbytes: reserved bytes.
        seconds: of a step.
        barely: whether it fits with less room than the plan may be off.
        lacks_host: whether the host has too little memory.
        is_padded: whether a rank has much more of the weights than its part.
        filling: reserved bytes as a part of the device's room.
    """

    keys: Keys
    fits: bool
    nbytes: int
    seconds: float
    barely: bool = False
    lacks_host: bool = False
    is_padded: bool = False
    filling: float = 0.0


def search_widely(
    grids: Callable[[Keys], Sequence[Sequence[Axis]]],
    plan: Plan,
    further: Sequence[Sequence[Keys]],
    smaller: Sequence[Sequence[Keys]],
    last: Sequence[Keys],
    helps: Callable[[Found], bool],
    width: int = 1,
    likeness: Callable[[Keys], Hashable] = frozenset,
) -> list[Found]:
    """Plan the job as it is, then grids of settings, and grids with further settings if needed. Return all plans.

    If nothing fits, or no grid is without further settings, the first of the further and of the smaller settings with
    which the smallest point fits are searched, and the first of ``last``, each unless its smallest point is slower than
    what was found. If something fits, and ``helps`` says that further settings may be faster, they are searched as long
    as each is faster than the one before.

    Args:
        grids: with these settings. The first one that has a point that fits counts. None: they do not go together.
        plan: begins a plan, at most once of the same settings.
        further: for each setting its values in order: each takes less memory than the one before.
        smaller: the same of settings that are tried only if nothing else fits.
        last: settings that are mostly slower. They are tried alone, and with the others if nothing else fits.
        helps: whether further settings may be faster than this plan.
        width: points that are planned at a time.
        likeness: a value that is equal for keys that are the same settings.
    """
    plans: list[Found] = []
    planned: dict[Hashable, Later] = {}

    def begin(keys: Keys) -> Later:
        name = likeness(keys)
        if name not in planned:
            planned[name] = _kept(plan(keys), plans)
        return planned[name]

    def made(keys: Keys) -> Found | None:
        return begin(keys)()

    def corner(keys: Keys) -> Found | None:
        """Return the plan of the smallest point that fits, or of any, of the first grid that has one."""
        for axes in grids(keys):
            smallest: Found | None = None
            for point in corners(axes):
                if (found := made(point)) is not None and found.fits:
                    return found
                smallest = smallest or found
            if smallest is not None:
                return smallest
        return None

    def fits(keys: Keys) -> bool:
        """Return whether the smallest point fits, or may fit: no grid has a plan of it."""
        return bool(grids(keys)) and ((found := corner(keys)) is None or found.fits)

    def look(keys: Keys) -> None:
        for axes in grids(keys):
            if fastest(search(axes, begin, width)) is not None:
                return

    def first(keys: Keys, values: Sequence[Keys]) -> Keys | None:
        """Return the first of the values with which a point fits; none if the last one has no such point."""
        settings = [each for value in values if grids(each := with_keys(keys, value))]
        return next(filter(fits, settings), None) if settings and fits(settings[-1]) else None

    job = begin(())
    if width > 1 and (first_grid := next(iter(grids(())), None)):
        begin(next(corners(first_grid)))  # which is wanted next if the job does not fit
    now = job()
    if (now is not None and now.fits) or fits(()):
        look(())
    best = fastest(plans)
    if best is None or not grids(()):  # or the job has further settings, without which there is none
        ways: list[Keys] = []
        for keys in ((), *last):
            if keys and fits(keys):
                ways.append(keys)
                break
            if not ways:
                ways += filter(None, (first(keys, values) for values in (*further, *smaller)))
        for _, keys in sorted((found.seconds if (found := corner(way)) else 0.0, way) for way in ways):
            best = fastest(plans)
            if best is None or (found := corner(keys)) is None or found.seconds <= NEAR * best.seconds:
                look(keys)
    elif helps(best):
        settings: Keys = ()
        for values in further:
            for keys in values:
                probe = made(with_keys(best.keys, keys))
                if probe is not None and probe.seconds > NEAR * best.seconds:
                    break
                look(with_keys(settings, keys))
                before, best = best, min((each for each in plans if each.fits), key=lambda each: each.seconds)
                if best is before:
                    break
                settings = with_keys(settings, keys)
    return plans


def corners(axes: Sequence[Axis]) -> Iterator[Keys]:
    """Yield the settings of the points that may take the least memory, the likely one first."""
    ends = ((axis.values[-1], axis.values[0]) if axis.lone else (axis.values[-1],) for axis in axes)
    for values in itertools.product(*ends):
        yield tuple(pair for keys in values for pair in keys)


def with_keys(keys: Keys, other: Keys) -> Keys:
    """Return the keys with the values of others, in place of their own."""
    return tuple({**dict(keys), **dict(other)}.items())


def _kept(later: Later, plans: list[Found]) -> Later:
    """Return a function that waits for a plan once, adds it to ``plans`` and returns it."""

    @functools.cache
    def wait() -> Found | None:
        found = later()
        if found is not None:
            plans.append(found)
        return found

    return wait


def search(axes: Sequence[Axis], plan: Plan, width: int = 1) -> list[Found]:
    """Plan points of a grid until the fastest one that fits is known, if the order of the values holds.

    The neighbours of the fastest point are planned too, so that it is not missed where an order does not hold by one
    value. Those that take more memory than a point far above the device's are left out. Plans are read in the order in
    which they began, so that the same points are planned each time.

    Args:
        axes: the grid.
        plan: begins the plan of a point.
        width: points that are planned at a time.
    """
    sizes = [len(axis.values) for axis in axes]
    unknown = set(itertools.product(*map(range, sizes)))
    begun: deque[tuple[Point, Later]] = deque()
    found: dict[Point, Found | None] = {}

    def begin(point: Point) -> None:
        unknown.discard(point)
        begun.append((point, plan(_keys_at(axes, point))))

    def read() -> None:
        point, later = begun.popleft()
        found[point] = result = later()
        if result is not None:
            unknown.difference_update(
                {p for p in unknown if (_slower(p, point) if result.fits else _larger(axes, p, point))}
            )

    while unknown or begun:
        while unknown and len(begun) < width:
            begin(_next(axes, unknown, [point for point, _ in begun]))
        read()
    while (best := fastest(found.values())) is not None:
        at = next(point for point, each in found.items() if each is best)
        near = [
            (*at[:i], at[i] + step, *at[i + 1 :])
            for i in range(len(at))
            for step in (1, -1)
            if 0 <= at[i] + step < sizes[i]
        ]
        far = [point for point, each in found.items() if each is not None and each.filling > FAR]
        new = [
            point for point in near if point not in found and not any(_larger(axes, point, p) for p in far)
        ]
        if not new:
            break
        for point in new:
            begin(point)
        while begun:
            read()
    return [each for each in found.values() if each is not None]


def first_keys(axes: Sequence[Axis]) -> Keys:
    """Return the settings of the point that `search` plans first."""
    points = set(itertools.product(*(range(len(axis.values)) for axis in axes)))
    return _keys_at(axes, _next(axes, points, []))


def _next(axes: Sequence[Axis], unknown: set[Point], begun: Sequence[Point]) -> Point:
    """Return the unknown point whose plan decides most points in the worse case; if possible none that a plan decides
    which has begun."""

    def decides(point: Point) -> tuple[bool, int, Point]:
        is_open = not any(_slower(point, each) or _larger(axes, point, each) for each in begun)
        after = sum(_slower(each, point) for each in unknown)
        before = sum(_larger(axes, each, point) for each in unknown)
        return is_open, min(after, before), tuple(-i for i in point)

    return max(unknown, key=decides)


def _keys_at(axes: Sequence[Axis], point: Point) -> Keys:
    return tuple(pair for axis, i in zip(axes, point, strict=True) for pair in axis.values[i])


def _slower(one: Point, other: Point) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))


def _larger(axes: Sequence[Axis], one: Point, other: Point) -> bool:
    """Return whether one point takes more memory than another for certain."""
    lone = [i for i, axis in enumerate(axes) if axis.lone]
    return _slower(other, one) and all((one[i] == 0) == (other[i] == 0) for i in lone)


def fastest(plans: Iterable[Found | None]) -> Found | None:
    """Return the fastest plan that fits, or None if none does."""
    fitting = [each for each in plans if each is not None and each.fits]
    return min(fitting, key=lambda each: each.seconds, default=None)


def frontier(plans: Sequence[Found]) -> list[Found]:
    """Return the plans that fit and for which no other is both faster and smaller, the fastest first."""
    kept: list[Found] = []
    for each in sorted((each for each in plans if each.fits), key=lambda each: (each.seconds, each.nbytes)):
        if not kept or each.nbytes < kept[-1].nbytes:
            kept.append(each)
    return kept
