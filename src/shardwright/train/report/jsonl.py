"""metrics.jsonl: the records of a run's steps, the failed saves and the incidents, written, moved away and read.

Nothing here prints or measures.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from shardwright.common.durable import replace_file, sync
from shardwright.common.json_text import not_finite, strict_json
from shardwright.train.config.catalog.records import Incident, RunEnd, RunSink, StepRecord
from shardwright.train.errors import UserError
from shardwright.train.run.metrics import INCIDENT, SAVE_FAILURE
from shardwright.train.run.writing import writing

MAPPINGS = tuple(each.name for each in fields(StepRecord) if each.metadata.get("numbers"))
"""The keys of a step whose values are objects of numbers."""
EVENTS = ({"step", SAVE_FAILURE}, {"step", INCIDENT})

NOT_FINITE = "not_finite"
"""The key of a step with figures that are nan or infinite: these as text, by their names. Their values are null."""


class JsonLines(RunSink):
    """metrics.jsonl: every step, floats in full precision, every checkpoint that could not be written, incidents."""

    def __init__(
        self, path: Path, steps_done: int, dropped: Path, left_out: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Lines of steps after `steps_done` go to the end of the file `dropped`, without the incidents before the
        checkpoint, which has the samples `left_out`."""
        self.path, self._dropped = path, dropped

        def came_before(incident: Mapping[str, Any]) -> bool:
            first, stop = incident["samples"]
            return any(start <= first and stop <= end for start, end in left_out)

        with writing(path):
            if os.path.isfile(path):  # not a device: a new run does not look for earlier lines
                drop_after(path, steps_done, dropped, came_before)
            self.stream: TextIO = path.open("a" if steps_done else "w", encoding="utf-8")

    def step(self, record: StepRecord) -> None:
        self._write(asdict(record))

    def save_failed(self, step: int, reason: str) -> None:
        self._write({"step": step, SAVE_FAILURE: reason})

    def incident(self, incident: Incident) -> None:
        content = {
            key: value for key, value in asdict(incident).items() if key != "step" and value is not None
        }
        self._write({"step": incident.step, INCIDENT: content})

    def rewind(self, step: int) -> None:
        """Move the lines of later steps away, because the run repeats these steps. Those of rewinds stay."""
        with writing(self.path):
            self.stream.close()
            drop_after(self.path, step, self._dropped, lambda incident: incident["action"] == "rewind")
            self.stream = self.path.open("a", encoding="utf-8")

    def _write(self, content: Mapping[str, Any]) -> None:
        with writing(self.path):
            self.stream.write(_line(content))
            self.stream.flush()

    def say(self, text: str) -> None:
        pass

    def close(self, end: RunEnd) -> None:
        with writing(self.path):
            self.stream.close()


def _line(content: Mapping[str, Any]) -> str:
    wrong = not_finite(content)
    return strict_json({**content, NOT_FINITE: wrong} if wrong else content) + "\n"


def drop_after(
    path: Path, steps_done: int, dropped: Path, keeps: Callable[[Mapping[str, Any]], bool] = lambda _: False
) -> None:
    """Move records of steps after `steps_done` to the end of another file, because the run repeats these steps.

    `keeps` gets the content of each line about an incident of such a step, and says whether it stays.
    """
    if steps_done < 0:
        raise ValueError(f"expected steps_done >= 0, found {steps_done}")
    if steps_done:
        kept, gone = "", ""
        for line in _lines(path):
            if line["step"] <= steps_done or (INCIDENT in line and keeps(line[INCIDENT])):
                kept += _line(line)
            else:
                gone += _line(line)
    else:
        kept, gone = "", path.read_text(encoding="utf-8", errors="replace")
    if gone:
        with dropped.open("a", encoding="utf-8") as stream:
            stream.write(gone if gone.endswith("\n") else gone + "\n")
            stream.flush()
            sync(stream.fileno(), dropped)
    replace_file(path, kept.encode())


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of the steps in a metrics file, with nan and infinities. If a crash cut off the last line, it
    is left out.

    Raises UserError if the file cannot be read, or if a line is no record; the error names the line's number.
    """
    return [line for line in _lines(path) if line.keys() not in EVENTS]


def read_what_is_whole(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Return the records of steps, the lines about incidents and failed saves, and an error for each line that is
    damaged.

    Raises UserError if the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot read the metrics: {error.strerror}; restore the file") from None
    records: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    errors: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = _record(line, f"line {number} of {path}")
        except UserError as error:
            errors.append(str(error))
        else:
            (events if record.keys() in EVENTS else records).append(record)
    return records, events, errors


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the metrics: {error.strerror}; restore the file") from None
    except ValueError as error:
        raise UserError(
            f"{path}: cannot read the metrics: {error}; the file is damaged: restore it"
        ) from None
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [_record(line, f"line {number} of {path}") for number, line in enumerate(lines, start=1)]


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"metrics: expected JSON, found something else in {where}") from None
    if not isinstance(record, dict):
        raise UserError(f"metrics: expected a JSON object, found {type(record).__name__} in {where}")
    if record.keys() in EVENTS and type(record["step"]) is int:
        return record
    try:
        wrong = _restored(record, record.pop(NOT_FINITE, {}))
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
        raise UserError(f"metrics: expected figures of the step in {NOT_FINITE} in {where}") from None
    for column in fields(StepRecord):
        if column.name in MAPPINGS:
            continue
        value, optional = record.get(column.name), column.metadata.get("optional", False)
        finite = _is_number(value) and math.isfinite(value)
        if not finite and column.name not in wrong and not (optional and value is None):
            raise UserError(f"metrics: expected a number for {column.name}, found {value!r:.200} in {where}")
    for name in MAPPINGS:
        values = record.get(name, {})
        if not isinstance(values, dict) or not all(
            value is None or _is_number(value) for value in values.values()
        ):
            raise UserError(
                f"metrics: expected an object of numbers for {name}, found {values!r:.200} in {where}"
            )
        if None in values.values():
            record[name] = {key: math.nan if value is None else value for key, value in values.items()}
    if record["seconds"] <= 0:
        raise UserError(f"metrics: expected seconds > 0, found {record['seconds']} in {where}")
    return record


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether it is a float, or a whole number of 64 bits: sums of others may be beyond all floats."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _restored(record: dict[str, Any], wrong: Mapping[str, Any]) -> set[str]:
    """Give figures that are not finite their values, which are text in `wrong`. Returns the names."""
    for name, text in wrong.items():
        if isinstance(text, Mapping):
            _restored(record[name], text)
        else:
            record[name] = float(text)
    return {*wrong}
