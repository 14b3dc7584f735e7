"""Times that ``shardwright calibrate`` has measured or imported: tables by operation, and their form in files.

A table has points, each with the sizes of a kernel and its seconds. A time between points is interpolated. Nothing here
imports torch.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.planner.program import Kernel
from shardwright.planner.samples import error, without_each
from shardwright.planner.work import Work

Point = tuple[float, ...]  #: sizes, and the seconds last
NEAREST = 4  #: points from which the time of a product is interpolated
#: Seconds of the host: for an operation, for a kernel of a compiled graph, for a collective with the copies around it.
HOST = ("host", "host_compiled", "host_collective")
#: Kinds of times, each of which has a range.
SPREADS = ("products", "attention", "memory", "links", "host")


class MeasuredError(ValueError):
    """Raised for a table of a device file that cannot be read. The message is one line."""


@dataclass(frozen=True)
class Measured:
    """Measured times of a device.

    Attributes:
        kernels: by :func:`key_of` the points of a table. Sizes of products and attention are those of their work; of
            other kernels it is the number of bytes.
        collectives: by kind (``gather``, ``scatter``, ``reduce``) points of whole bytes and seconds.
        host: seconds of the host, by the names in ``HOST``.
        spread: by the names in ``SPREADS`` the relative range of the times: how far repeated measurements differ, and
            how far a time between measured sizes may be from the measured one.
            Without times of operations that read and write memory, ``host`` and ``spread`` are empty.
        ranks: that have measured the collectives together; 0: none, then they follow the figures of links.
        on_host: whether kernels run on the host itself, one after another.
    """

    kernels: Mapping[str, Sequence[Point]]
    collectives: Mapping[str, Sequence[Point]]
    host: Mapping[str, float]
    spread: Mapping[str, float]
    ranks: int = 0
    on_host: bool = False
    _found: dict[str, list[Point]] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def whole(self) -> bool:
        """Whether the tables are for all kernels. Else other kernels follow the figures of the device."""
        return any(len(point) == 2 for rows in self.kernels.values() for point in rows)

    def has(self, kernel: Kernel, work: Work) -> bool:
        """Return whether the tables are for a kernel.

        Tables that are not whole are for products and attention alone, in their own dtypes and directions.
        """
        return self.whole or (work.kind in ("products", "attention") and bool(self._same_dtype(kernel, work)))

    def seconds(self, kernel: Kernel, work: Work) -> float:
        """Return the time of a kernel that is no collective."""
        if work.kind == "products" or work.kind == "attention":
            return self._by_sizes(kernel, work)
        return interpolated(self._points(kernel), work.nbytes)

    def collective(self, name: str, nbytes: float, ranks: int) -> float:
        """Return the time of a collective whose whole has ``nbytes``. NCCL's rings are assumed between GPUs."""
        kind = kind_of_collective(name)
        seconds = interpolated(self.collectives[kind], nbytes)
        if (
            self.on_host
        ):  # through shared memory each rank reads the whole, in sums over ranks once for each of them
            return seconds * (ranks / self.ranks if kind == "reduce" else 1)
        return seconds * ((ranks - 1) / ranks) / ((self.ranks - 1) / self.ranks)

    def _points(self, kernel: Kernel) -> list[Point]:
        """Return the points of the operation with such shapes; else with its dtype; else with any; else of all
        operations."""
        exact = key_of(kernel)
        if (points := self._found.get(exact)) is None:
            name, dtype, _ = exact.split(" ", 2)
            points = (
                list(self.kernels.get(exact, ()))
                or self._beginning_with(f"{name} {dtype} ")
                or self._beginning_with(f"{name} ")
                or self._of_all
            )
            points = self._found[exact] = merged(points)
        return points

    def _beginning_with(self, start: str) -> list[Point]:
        return [point for key, points in self.kernels.items() if key.startswith(start) for point in points]

    @functools.cached_property
    def _of_all(self) -> list[Point]:
        points: list[Point] = [each for rows in self.kernels.values() for each in rows if len(each) == 2]
        if not points:
            raise MeasuredError("expected times of operations that read and write memory, found none")
        return points

    def _by_sizes(self, kernel: Kernel, work: Work) -> float:
        """Return the seconds by the rates of the nearest sizes: for the operation and dtype, the dtype, or any."""
        points = self._same_dtype(kernel, work)
        if not points:
            points = [point for rows in self._like(kernel, work).values() for point in rows]
        if not points:
            return interpolated(merged(self._of_all), work.nbytes)
        return work.flops / rate_of(points, work)

    def _same_dtype(self, kernel: Kernel, work: Work) -> list[Point]:
        """Return the points of the operation and dtype; else of operations like it in the dtype."""
        if own := self.kernels.get(f"{kernel.name} {kernel.dtype}"):
            return list(own)
        like = self._like(kernel, work).items()
        return [point for key, rows in like if key.endswith(f" {kernel.dtype}") for point in rows]

    def _like(self, kernel: Kernel, work: Work) -> dict[str, Sequence[Point]]:
        """Return the tables of operations like this one, in any dtype."""
        return {
            key: rows
            for key, rows in self.kernels.items()
            if rows and len(rows[0]) == len(work.sizes) + 1
            and all((word in key) == (word in kernel.name) for word in ("attention", "backward"))
        }  # fmt: skip


def rate_of(points: Sequence[Point], work: Work) -> float:
    """Return operations a second of a kernel of these sizes: a mean over the nearest points, by their distances."""
    at = [math.log2(max(size, 1)) for size in work.sizes]
    near: list[tuple[float, float]] = []
    scale = work.flops / math.prod(work.sizes)
    for *sizes, seconds in points:
        distance = sum((math.log2(max(size, 1)) - x) ** 2 for size, x in zip(sizes, at, strict=True))
        near.append((distance, math.log(scale * math.prod(sizes) / seconds)))
    near = sorted(near)[:NEAREST]
    weights = [1 / (distance + 1e-3) ** 2 for distance, _ in near]
    mean = sum(weight * each for weight, (_, each) in zip(weights, near, strict=True)) / sum(weights)
    return math.exp(mean)


def interpolated(points: Sequence[Point], nbytes: float) -> float:
    """Return the seconds for a number of bytes, from points that are sorted and have different bytes.

    Between two points it is on the line between their logarithms. Below the first point it has that point's seconds,
    and above the last one that point's rate.
    """
    below = [point for point in points if point[0] <= nbytes]
    if not below:
        return points[0][1]
    if len(below) == len(points):
        return below[-1][1] * nbytes / below[-1][0]
    (x0, y0), (x1, y1) = below[-1], points[len(below)]
    part = math.log(nbytes / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + part * math.log(y1 / y0))


def merged(points: Iterable[Point]) -> list[Point]:
    """Return the points in order; those with nearly as many bytes are one, with the median of the seconds a byte."""
    groups: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        groups[round(3 * math.log2(max(point[0], 1)))].append(point)
    found: list[Point] = []
    for _, group in sorted(groups.items()):
        nbytes = statistics.mean(each[0] for each in group)
        found.append((nbytes, nbytes * statistics.median(each[1] / max(each[0], 1) for each in group)))
    return found


def errors_between(points: Sequence[Point]) -> list[float]:
    """Return the errors with which the other points of a table predict each of its points.

    Points that are one for a plan (:func:`merged`) are one here. Nothing for a table with a single point.
    """
    if len(points[0]) == 2:
        return [
            error(interpolated(rest, nbytes), seconds)
            for (nbytes, seconds), rest in without_each(merged(points))
        ]
    errors = []
    for (*sizes, seconds), rest in without_each(points):
        work = Work("products", math.prod(sizes), 0, tuple(map(int, sizes)))
        errors.append(error(work.flops / rate_of(rest, work), seconds))
    return errors


def kind_of_table(table: str, point: Sequence[float]) -> str:
    """Return the name in ``SPREADS`` of a table of kernels, by its key and the sizes of a point, without
    the seconds."""
    return "attention" if "attention" in table else "products" if len(point) == 4 else "memory"


def key_of(kernel: Kernel) -> str:
    """Return the table of a kernel: its operation, its dtype, and how its other shapes differ from the first one.

    ``=``: as the first one. A shape with as many dimensions has ``-`` for each that is as large and ``1`` or ``x`` for
    others. Else it is the number of dimensions.
    """
    first = kernel.shapes[0] if kernel.shapes else ()
    words = []
    for shape in kernel.shapes[1:]:
        if shape == first:
            words.append("=")
        elif len(shape) == len(first):
            words.append(
                "".join("-" if a == b else "1" if b == 1 else "x" for a, b in zip(first, shape, strict=True))
            )
        else:
            words.append(str(len(shape)))
    return f"{kernel.name} {kernel.dtype} {len(first)}:{','.join(words)}"


def table_of(kernel: Kernel, work: Work) -> tuple[str, Point]:
    """Return the table into which the time of a kernel goes, and the sizes of its point."""
    if work.kind == "products" or work.kind == "attention":
        return f"{kernel.name} {kernel.dtype}", tuple(work.sizes)
    return key_of(kernel), (work.nbytes,)


def kind_of_collective(name: str) -> str:
    """Return the kind of a collective: ``gather``, ``scatter`` or ``reduce``."""
    if "reduce_scatter" in name or "scatter" in name:
        return "scatter"
    return "reduce" if "reduce" in name else "gather"


# -- files


def as_toml(values: Mapping[str, Any]) -> str:
    """Return a device file. Values are texts, numbers, booleans, lists of numbers or points, and tables of these."""
    lines: list[str] = []
    _write(lines, "", values)
    return "\n".join(lines).strip() + "\n"


def _write(lines: list[str], head: str, values: Mapping[str, Any]) -> None:
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    if head and (len(tables) < len(values) or not values):
        lines += ["", f"[{head}]"]
    for key, value in values.items():
        if key not in tables:
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, table in tables.items():
        _write(lines, f"{head}.{_key(key)}" if head else _key(key), table)


def _key(text: str) -> str:
    return text if text.replace("_", "").isalnum() else _value(text)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        plain = "".join(each if each.isprintable() else " " for each in value)
        return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"expected a finite number, found {value}")
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    return "[" + ", ".join(map(_value, value)) + "]"


def measurement_values(measured: Measured) -> dict[str, Any]:
    """Return the table ``[measured]`` of a device file, without ``on_host``."""
    return {
        "ranks": measured.ranks,
        "host": dict(measured.host),
        "spread": dict(measured.spread),
        "collectives": {key: _sorted(points) for key, points in sorted(measured.collectives.items())},
        "kernels": {key: _sorted(points) for key, points in sorted(measured.kernels.items())},
    }


def _sorted(points: Iterable[Point]) -> list[list[float]]:
    return [list(point) for point in sorted(points)]


def read_measured(key: str, values: Any, on_host: bool, all_figures: bool = False) -> Measured:
    """Return the table ``[measured]`` of the device ``key``.

    ``all_figures``: the file has figures for all kernels, so the tables need not be whole.

    Raises:
        MeasuredError: it is not as :func:`measurement_values` has made it.
    """
    if not isinstance(values, dict):
        raise MeasuredError(f"device {key}: expected a table [measured], found {values!r}")

    def numbers(name: str, names: Sequence[str]) -> dict[str, float]:
        table = values.get(name)
        found: dict[str, float] = {}
        for each in names:
            number = table.get(each) if isinstance(table, dict) else None
            if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number < math.inf:
                raise MeasuredError(
                    f"device {key}: [measured.{name}] needs {each}, a number, found {number!r}"
                )
            found[each] = float(number)
        return found

    def points(name: str) -> dict[str, list[Point]]:
        table = values.get(name)
        if not isinstance(table, dict):
            raise MeasuredError(f"device {key}: expected a table [measured.{name}], found {table!r}")
        return {
            each: [_point(key, name, each, point) for point in _listed(rows)] for each, rows in table.items()
        }

    ranks = values.get("ranks")
    if not isinstance(ranks, int) or ranks < 0:
        raise MeasuredError(f"device {key}: [measured] needs ranks, an integer, found {ranks!r}")
    kernels, collectives = points("kernels"), points("collectives")
    whole = any(len(point) == 2 for rows in kernels.values() for point in rows)
    if not whole and not (all_figures and kernels):
        raise MeasuredError(f"device {key}: [measured.kernels] needs points of bytes and seconds, found none")
    if ranks and not all(collectives.get(kind) for kind in ("gather", "scatter", "reduce")):
        raise MeasuredError(
            f"device {key}: [measured.collectives] needs points of gather, scatter and reduce"
        )
    host, spread = (numbers("host", HOST), numbers("spread", SPREADS)) if whole else ({}, {})
    return Measured(kernels, collectives, host, spread, ranks, on_host)


def _listed(rows: Any) -> list[Any]:
    return rows if isinstance(rows, list) else [rows]


def _point(key: str, name: str, table: str, point: Any) -> Point:
    numbers = isinstance(point, list) and all(isinstance(each, int | float) for each in point)
    if not numbers or len(point) not in (2, 5) or not all(0 < each < math.inf for each in point):
        raise MeasuredError(
            f"device {key}: [measured.{name}] {table!r}: expected sizes and seconds, found {point!r}"
        )
    return tuple(map(float, point))
