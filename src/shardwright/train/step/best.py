"""The checkpoint with the best value of a figure, for `[checkpoint] keep_best`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.report.jsonl import read_records
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.hooks import Hooks

LOSSES = ("loss", "validation_loss")
PREFIX = "validation_"


class Best(NamedTuple):
    """The best step of those that have a checkpoint, and its value."""

    step: int
    value: float


class BestCheckpoint:
    """Finds the best checkpoint in metrics.jsonl, so a resumed run finds the same one.

    Args:
        config: has the name of the figure: `loss`, `validation_loss`, a metric of a hook, or `validation_` and one.
        folder: of the run.
        hooks: of the run; they say of which metrics a higher value is better.

    Raises:
        UserError: no step has this figure.
    """

    def __init__(self, config: Config, folder: RunFolder, hooks: Hooks) -> None:
        self.name, self._folder = config.checkpoint.keep_best, folder
        known = [*LOSSES, *hooks.step_metrics, *(f"{PREFIX}{name}" for name in hooks.validation_metrics)]
        if self.name not in known:
            raise UserError(
                f"checkpoint.keep_best: expected one of {', '.join(known)}, found {self.name!r}; metrics of your own "
                "come from run.hooks"
            )
        metric = self.name.removeprefix(PREFIX)
        self._higher = self.name not in LOSSES and any(
            metric in hook.higher_is_better for hook in hooks.users
        )

    def among(self, steps: Collection[int]) -> Best | None:
        """The best of these steps; the earlier of equal ones. None: none of them has the figure."""
        found = [
            Best(record["step"], value)
            for record in read_records(self._folder.metrics_file)
            if record["step"] in steps and math.isfinite(value := self._value(record))
        ]
        sign = -1 if self._higher else 1
        return min(found, key=lambda best: (sign * best.value, best.step), default=None)

    def _value(self, record: Mapping[str, Any]) -> float:
        """The value of the figure; nan if the step has none."""
        value = record.get(self.name) if self.name in LOSSES else None
        if self.name not in LOSSES:
            key = "validation_metrics" if self.name.startswith(PREFIX) else "metrics"
            value = record.get(key, {}).get(self.name.removeprefix(PREFIX))
        return math.nan if value is None else float(value)
