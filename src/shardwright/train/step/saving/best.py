"""The checkpoint with the best value of a figure, for `[checkpoint] keep_best`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from shardwright.train.config import DataConfig
from shardwright.train.config.catalog.hooks import TrainerHook
from shardwright.train.config.catalog.records import LOSSES, SET_PREFIX, StepRecord, of_sets
from shardwright.train.errors import UserError
from shardwright.train.report.jsonl import read_records
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.hooks import Hooks

PREFIX = "validation_"


class Best(NamedTuple):
    """The best step of those that have a checkpoint, and its value."""

    step: int
    value: float


class BestCheckpoint(TrainerHook):
    """Finds the best checkpoint. A resumed run finds the same one: values of earlier sessions come from metrics.jsonl.

    Args:
        figure: its name: `loss`, `validation_loss`, `validation_loss/` and the name of a set, a metric of a hook, or
            `validation_` and one.
        data: `[data]`, which has the sets for validation.
        folder: of the run.
        hooks: of the run; they say of which metrics a higher value is better.
        say: prints a line.

    Attributes:
        warnings: in words, that no checkpoint has a finite value; empty if one has.

    Raises:
        UserError: no step has this figure.
    """

    def __init__(
        self, figure: str, data: DataConfig, folder: RunFolder, hooks: Hooks, say: Callable[[str], None]
    ) -> None:
        self.figure, self._folder, self._say = figure, folder, say
        self.warnings: list[str] = []
        sets = of_sets(data.validation_sets)
        known = [
            *LOSSES,
            *sets,
            *hooks.step_metrics,
            *(f"{PREFIX}{name}" for name in hooks.validation_metrics),
        ]
        if self.figure not in known:
            raise UserError(
                f"checkpoint.keep_best: expected one of {', '.join(known)}, found {self.figure!r}; metrics of your own "
                "come from run.hooks"
            )
        metric = self.figure.removeprefix(PREFIX)
        self._higher = self.figure not in (*LOSSES, *sets) and any(
            metric in hook.higher_is_better for hook in hooks.users
        )
        #: By step, None for a step without the figure. None until the first rank asks for them.
        self._values: dict[int, float | None] | None = None

    def after_step(self, record: StepRecord) -> None:
        if self._values is not None:
            self._values[record.step] = self._value(vars(record))

    def among(self, steps: Collection[int]) -> Best | None:
        """Return the best of these steps; the earlier of equal ones. None: none of them has the figure, or all values
        are nan or infinite, of which a line warns."""
        if self._values is None:
            self._values = {
                each["step"]: self._value(each) for each in read_records(self._folder.metrics_file)
            }
        newest = max(steps, default=0)  # a later step may be written in the background
        self._values = {step: each for step, each in self._values.items() if step in steps or step > newest}
        values = [
            Best(step, each) for step, each in self._values.items() if step in steps and each is not None
        ]
        finite = [best for best in values if math.isfinite(best.value)]
        if values and not finite:
            text = f"no checkpoint is the best: {self.figure} is not finite in any step that has one"
            if not self.warnings:
                self._say(f"warning: checkpoint.keep_best: {text}")
            self.warnings = [text]
        else:
            self.warnings = []
        sign = -1 if self._higher else 1
        return min(finite, key=lambda best: (sign * best.value, best.step), default=None)

    def forget(self, step: int) -> None:
        """Do not count the checkpoint of this step, which is damaged, unless the step is done again."""
        if self._values is not None:
            self._values[step] = None

    def _value(self, record: Mapping[str, Any]) -> float | None:
        """Return the value of the figure; None if the step has none."""
        value = record.get(self.figure) if self.figure in LOSSES else None
        if self.figure.startswith(SET_PREFIX):
            value = record.get("validation_losses", {}).get(self.figure.removeprefix(SET_PREFIX))
        elif self.figure not in LOSSES:
            key = "validation_metrics" if self.figure.startswith(PREFIX) else "metrics"
            value = record.get(key, {}).get(self.figure.removeprefix(PREFIX))
        return None if value is None else float(value)
