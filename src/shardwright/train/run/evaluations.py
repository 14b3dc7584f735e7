"""Results of tasks on checkpoints of a run: `evaluations/STEP.json`, written and read.

The names and words of metrics are here, too. Nothing here computes a metric or prints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.train.errors import UserError
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.writing import write_json

TASKS = "tasks/"
"""Begins the name of a metric of a task, everywhere except in the file."""


class Evaluation(NamedTuple):
    """The tasks of a step, by name, as in the file."""

    step: int
    tasks: Mapping[str, Any]


def add_tasks(file: Path, step: int | None, tasks: Mapping[str, Any]) -> None:
    """Write results of tasks. Other tasks in the file stay. Raises UserError if the file is damaged, or cannot be
    written."""
    write_json(file, {"step": step, "tasks": {**(_tasks(file) if file.exists() else {}), **tasks}})


def evaluations_of(folder: RunFolder, last: int) -> list[Evaluation]:
    """Return the results of all steps up to `last`, the newest last. Raises UserError for a damaged file."""
    return [evaluation_at(folder, step) for step in evaluated_steps(folder) if step <= last]


def evaluated_steps(folder: RunFolder) -> list[int]:
    """Return the steps that have results, in ascending order."""
    return sorted(int(file.stem) for file in folder.evaluations.glob("*.json") if file.stem.isdecimal())


def unfinished_steps(folder: RunFolder) -> list[int]:
    """Return the steps whose evaluation has begun and has no results, in ascending order: they have a log alone."""
    begun = {int(file.stem) for file in folder.evaluations.glob("*.log") if file.stem.isdecimal()}
    return sorted(begun - {*evaluated_steps(folder)})


def failures_of(folder: RunFolder, step: int) -> int:
    """Return the number of failed evaluations of a step since its checkpoint was written."""
    try:
        return int(_failures(folder, step).read_text())
    except (OSError, ValueError):
        return 0


def note_failures(folder: RunFolder, step: int, failures: int) -> None:
    """Write the number that :func:`failures_of` returns. Raises OSError."""
    file = _failures(folder, step)
    if failures:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(failures))
    else:
        file.unlink(missing_ok=True)


def _failures(folder: RunFolder, step: int) -> Path:
    return folder.evaluation_log(step).with_suffix(".failures")


def evaluation_at(folder: RunFolder, step: int) -> Evaluation:
    """Return the results of a step. Raises UserError for a missing or damaged file."""
    return Evaluation(step, _tasks(folder.evaluation_file(step)))


def scalars_of(tasks: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of tasks by the names that TensorBoard and services show, without those that are no
    numbers."""
    return {
        f"{TASKS}{name}/{metric}": figure["value"]
        for name, task in tasks.items()
        for metric, figure in task["metrics"].items()
        if figure["value"] is not None and math.isfinite(figure["value"])
    }


def metric_in_words(figure: Mapping[str, Any] | None) -> str:
    """Return a metric of a task, such as "0.5120 ± 0.0130"; "-" if there is none."""
    if figure is None or figure["value"] is None:
        return "-"
    error = figure.get("stderr")
    return f"{figure['value']:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _tasks(file: Path) -> dict[str, Any]:
    try:
        tasks = json.loads(file.read_text(encoding="utf-8"))["tasks"]
        for task in tasks.values():
            for figure in task["metrics"].values():
                if not isinstance(figure["value"], int | float | None):
                    raise TypeError("a value is no number")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file}: expected results of tasks, found {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}; "
            "the file is damaged: remove it"
        ) from None
    return dict(tasks)
