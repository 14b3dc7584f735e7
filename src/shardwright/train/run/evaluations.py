"""Results of tasks on checkpoints of a run: `evaluations/STEP.json`, written and read.

Nothing here computes a metric or prints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.train.errors import UserError
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.writing import write_json


class Evaluation(NamedTuple):
    """The tasks of a step, by name, as in the file."""

    step: int
    tasks: Mapping[str, Any]


def add_tasks(file: Path, step: int | None, tasks: Mapping[str, Any]) -> None:
    """Write results of tasks. Other tasks in the file stay. Raises UserError if the file is damaged, or cannot be
    written."""
    write_json(file, {"step": step, "tasks": {**(_tasks(file) if file.exists() else {}), **tasks}})


def newest_evaluation(folder: RunFolder, last: int) -> Evaluation | None:
    """The results of the newest step up to `last`. None: there are none. Raises UserError for a damaged file."""
    steps = [int(file.stem) for file in folder.evaluations.glob("*.json") if file.stem.isdecimal()]
    step = max((step for step in steps if step <= last), default=None)
    return None if step is None else Evaluation(step, _tasks(folder.evaluation_file(step)))


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
