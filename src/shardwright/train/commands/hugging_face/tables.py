"""Results of tasks for the terminal: of one evaluation, and of several runs side by side. Nothing here reads a file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from shardwright.train.run.evaluations import Evaluation, metric_in_words

MOST_STEPS = 10
"""Steps in a table; compare.json has all."""
CONDITIONS = {"samples": None, "shots": None, "version": None, "chat_template": False}
"""Facts of a task that must be equal where its metrics are compared, with the values of files without them."""


def of_tasks(step: int | None, tasks: Mapping[str, Any]) -> Table:
    """Return a row for each metric of each task. `step`: of the checkpoint, None for an exported folder."""
    table = _table("Tasks" if step is None else f"Tasks at step {step}")
    for name in ("value", "samples", "shots"):
        table.add_column(name, justify="right")
    for name, task in tasks.items():
        counts = ["-" if task[key] is None else str(task[key]) for key in ("samples", "shots")]
        for metric, figure in task["metrics"].items():
            table.add_row(name, metric, metric_in_words(figure), *counts)
    return table


def of_runs(names: Sequence[str], evaluations: Sequence[Evaluation | None]) -> Table:
    """Return a row for each metric of each task, and a column for each run with its newest results."""
    table = _table("Tasks")
    for name, evaluation in zip(names, evaluations, strict=True):
        step = "" if evaluation is None else f"\nstep {evaluation.step}"
        table.add_column(f"{name}{step}", justify="right", overflow="fold")
    of_each = [{} if each is None else each.tasks for each in evaluations]
    metrics = {
        (name, metric): None for tasks in of_each for name in tasks for metric in tasks[name]["metrics"]
    }
    for name, metric in metrics:
        figures = [tasks.get(name, {}).get("metrics", {}).get(metric) for tasks in of_each]
        table.add_row(name, metric, *map(metric_in_words, figures))
    return table


def over_steps(names: Sequence[str], evaluations: Sequence[Sequence[Evaluation]]) -> Table:
    """Return a row for each metric at each step, for the newest steps, and a column for each run."""
    by_step = [{each.step: each.tasks for each in own} for own in evaluations]
    steps = sorted({step for own in by_step for step in own})[-MOST_STEPS:]
    table = _table("Tasks over steps")
    table.add_column("step", justify="right")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    metrics = {
        (name, metric): None
        for own in by_step
        for step, tasks in own.items()
        if step in steps
        for name in tasks
        for metric in tasks[name]["metrics"]
    }
    for (name, metric), step in itertools.product(metrics, steps):
        figures = [own.get(step, {}).get(name, {}).get("metrics", {}).get(metric) for own in by_step]
        if any(figures):
            table.add_row(name, metric, str(step), *map(metric_in_words, figures))
    return table


def other_conditions(names: Sequence[str], evaluations: Sequence[Evaluation | None]) -> list[str]:
    """Return lines about tasks that runs have computed in other ways, so their metrics do not compare."""
    lines = []
    tasks = dict.fromkeys(task for each in evaluations if each is not None for task in each.tasks)
    for task, key in ((task, key) for task in tasks for key in CONDITIONS):
        values = {
            name: each.tasks[task].get(key, CONDITIONS[key])
            for name, each in zip(names, evaluations, strict=True)
            if each is not None and task in each.tasks
        }
        if len(set(map(str, values.values()))) > 1:
            words = ", ".join(f"{value} in {name}" for name, value in values.items())
            lines.append(f"{task} does not compare: {key} {words}")
    return lines


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in ("task", "metric"):
        table.add_column(name, overflow="fold")
    return table
