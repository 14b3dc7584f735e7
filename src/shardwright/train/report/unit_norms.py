"""unit_norms.jsonl: gradient norms by unit at some steps of a run, written and read.

A line has the names of units, or a step with the norms of these units in their order, or the step to which the run has
gone back. The file holds the names once, since a model may have hundreds of units. Nothing here computes a norm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from shardwright.common.json_text import strict_json
from shardwright.train.config.catalog.records import RunEnd, RunSink, StepRecord
from shardwright.train.run.writing import writing

DIGITS = 4
"""Digits of a norm."""
LARGEST = 1 << 53
"""The largest step that a page reads without loss."""
ROWS, CELLS, LONGEST = 300, 12_000, 100
"""Units and norms of a picture, and characters of a unit's name there."""


class UnitNormsFile(RunSink):
    """Writes the file, from its first record on. A norm that is not finite is null."""

    def __init__(self, path: Path, steps_done: int) -> None:
        """`steps_done`: steps before this session. With some the file goes on, else it begins again."""
        self._path, self._goes_on, self._steps_done = path, steps_done > 0, steps_done
        self._stream: TextIO | None = None
        self._units: list[str] = []
        if not self._goes_on:
            with writing(path):
                path.unlink(missing_ok=True)

    def step(self, record: StepRecord) -> None:
        pass

    def unit_norms(self, step: int, norms: Mapping[str, float], left_out: bool = False) -> None:
        with writing(self._path):
            stream = self._opened()
            if self._units != [*norms]:
                self._units = [*norms]
                self._write({"units": self._units})
            values = [float(f"{norm:.{DIGITS}g}") for norm in norms.values()]
            self._write({"step": step, **({"left_out": True} if left_out else {}), "norms": values})
            stream.flush()

    def rewind(self, step: int) -> None:
        with writing(self._path):
            stream = self._opened()
            self._write({"back_to": step})
            stream.flush()

    def _opened(self) -> TextIO:
        if self._stream is None:
            self._stream = self._path.open("a", encoding="utf-8")
            if self._stream.tell():
                self._stream.write("\n")  # a killed process may have left half a line
                self._write(
                    {"back_to": self._steps_done}
                )  # it may have come further than its last checkpoint
        return self._stream

    def _write(self, content: Mapping[str, Any]) -> None:
        assert self._stream is not None
        self._stream.write(strict_json(content, compact=True) + "\n")

    def say(self, text: str) -> None:
        pass

    def close(self, end: RunEnd) -> None:
        if self._stream is not None:
            with writing(self._path):
                self._stream.close()


@dataclass
class UnitNorms:
    """The content of the file.

    Attributes:
        steps: the norms of each recorded step, by unit; None for a norm that is not finite.
        left_out: the same of steps that were not made, for a fault: they may come several times.
        damaged: the numbers of lines that could not be read.
    """

    steps: dict[int, dict[str, float | None]] = field(default_factory=dict)
    left_out: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)

    @property
    def records(self) -> list[tuple[int, dict[str, float | None]]]:
        """All of them by step. Those of a step that was left out come before those with which it was made."""
        return sorted([*self.left_out, *self.steps.items()], key=lambda each: each[0])

    def go_back(self, step: int) -> None:
        """Drop the steps after this one, which come again."""
        while self.steps and (last := next(reversed(self.steps))) > step:
            del self.steps[last]


def heat_map(read: UnitNorms) -> dict[str, Any] | None:
    """Return the norms as a picture of units by steps has them; None without any.

    A picture has at most `ROWS` units, those with the largest norms, and `CELLS` cells. A column of several records has
    the largest norm of each unit. In ``rows`` a norm is null if the unit had no gradient, and -1 if it is not finite.
    """
    peaks: dict[str, float] = {}
    records = read.records
    for _, norms in records:
        for unit, norm in norms.items():
            peaks[unit] = max(peaks.get(unit, 0.0), math.inf if norm is None else norm)
    if not peaks:
        return None
    shown = {*sorted(peaks, key=lambda unit: -peaks[unit])[:ROWS]}
    units = [unit for unit in peaks if unit in shown]
    size = math.ceil(len(records) * len(units) / CELLS)  # records in a column
    columns = [records[first : first + size] for first in range(0, len(records), size)]
    return {
        "units": [unit[:LONGEST] for unit in units],
        "more_units": len(peaks) - len(units),
        "columns": [[column[0][0], column[-1][0]] for column in columns],
        "rows": [[_largest([norms for _, norms in column], unit) for column in columns] for unit in units],
        "left_out": [step for step, _ in read.left_out][:ROWS],
    }


def _largest(records: Sequence[Mapping[str, float | None]], unit: str) -> float | None:
    norms = [norms[unit] for norms in records if unit in norms]
    if None in norms:
        return -1
    largest = max((norm for norm in norms if norm is not None), default=None)
    return None if largest is None else float(f"{largest:.3g}")


def _finite(norm: Any) -> float | None:
    """Return the norm; None for one that is not finite.

    Raises:
        ValueError: it is negative.
    """
    if norm is None or not math.isfinite(norm):
        return None
    if norm < 0:
        raise ValueError(norm)
    return float(norm)


def read_unit_norms(path: Path) -> UnitNorms:
    """Return the norms, without those of steps that the run has repeated. Empty without the file.

    Raises:
        OSError: the file cannot be read.
    """
    read = UnitNorms()
    units: list[str] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return read
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            content: dict[str, Any] = json.loads(line) if line else {"units": units}
            if "units" in content:
                units = [str(each) for each in content["units"]]
                continue
            step = int(content["back_to"] if "back_to" in content else content["step"])
            if not 0 <= step <= LARGEST:
                raise ValueError(step)
            if "back_to" in content:
                read.go_back(step)
                continue
            by_unit = dict(zip(units, map(_finite, content["norms"]), strict=True))
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            read.damaged.append(number)
            continue
        if content.get("left_out"):
            read.left_out.append((step, by_unit))
        else:
            read.go_back(step - 1)
            read.steps[step] = by_unit
    return read
