"""The hooks of a job as one: the trainer's own and those of `[run] hooks`, called in this order.

An error of a user's hook names the hook and the line. While steps run nothing here communicates: what ranks must agree
on travels in the reduction of the step.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.engine import RankGroup
from shardwright.engine.compat import hook_count
from shardwright.engine.extend import ExtensionError
from shardwright.train.config import Config
from shardwright.train.config.catalog.figures import is_reserved
from shardwright.train.config.catalog.hooks import (
    Action,
    Fault,
    StepInProgress,
    Sums,
    TrainerHook,
    hooks as named_hooks,
)
from shardwright.train.config.catalog.records import COMMON_LOSSES, RunEnd, StepRecord
from shardwright.train.errors import UserError
from shardwright.train.models.outputs import called

ACTIONS: tuple[Action, ...] = ("stop", "rewind", "skip")
"""Actions that a hook may ask for, the strongest first."""


def hooks_of(paths: Sequence[str]) -> Hooks:
    """Return the hooks of `[run] hooks`, each made without arguments.

    Raises:
        ExtensionError: one cannot be made.
        UserError: two have the same name or metric.
    """
    made = []
    for path in paths:
        kind = named_hooks.get(path)
        made.append(called(f"Hook {kind.name!r}", kind))
    return Hooks(made)


class Hooks:
    """Several hooks, called one after another."""

    def __init__(self, users: Sequence[TrainerHook] = ()) -> None:
        """`users`: the hooks of `[run] hooks`. Their errors are ExtensionErrors."""
        self.users = list(users)
        self.trainer_hooks: Sequence[TrainerHook] = ()
        self._end_reason = ""  # of the hook of this rank that has ended the run
        self._has_ended = False
        for hook, key in itertools.product(self.users, ("step_metrics", "validation_metrics")):
            if isinstance(name := getattr(hook, key), str):
                raise UserError(
                    f"run.hooks: expected {key} = ({name!r},) of hook {hook.name!r}, found {name!r}"
                )
            _check_takes_effect(hook)
        self.step_metrics = [name for hook in self.users for name in hook.step_metrics]
        self.validation_metrics = [name for hook in self.users for name in hook.validation_metrics]
        for what, names in (
            ("hook", [hook.name for hook in self.users]),
            ("metric", self.step_metrics),
            ("metric", self.validation_metrics),
        ):
            if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
                raise UserError(f"run.hooks: expected each name once, found the {what} {twice!r} twice")
        for name in (*self.step_metrics, *self.validation_metrics):
            if is_reserved(name):
                raise UserError(
                    f"run.hooks: expected another name for the metric {name!r}, which each step has"
                )

    def check_losses(self, auxiliary: Iterable[str], model: str) -> None:
        """Raise UserError if a loss of a model, beside the cross-entropy, has the name of another figure of a step."""
        for name in auxiliary:
            if is_reserved(name) and name not in COMMON_LOSSES:
                raise UserError(
                    f"model: expected another name for the loss {name!r} of {model}, which each step has; change it in "
                    "`auxiliary`"
                )
            if (hook := next((each for each in self.users if name in each.step_metrics), None)) is not None:
                raise UserError(
                    f"run.hooks: expected another name for the metric {name!r} of hook {hook.name!r}, which is also "
                    f"a loss of {model}"
                )

    def in_words(self, validates: bool) -> dict[str, str]:
        """Descriptions of the metrics, by their names in the lines of steps."""
        words: dict[str, str] = {}
        for hook in self.users:
            summary = f"hook {hook.name}: {hook.summary}" if hook.summary else f"of hook {hook.name}"
            words |= {f"validation {name}": summary for name in hook.validation_metrics if validates}
            words |= dict.fromkeys(hook.step_metrics, summary)
        return words

    def _call(self, hook: TrainerHook, method: str, *arguments: Any) -> Any:
        if hook in self.trainer_hooks:
            return getattr(hook, method)(*arguments)
        return called(f"The method {method} of hook {hook.name!r}", getattr(hook, method), *arguments)

    def _all(self, method: str, *arguments: Any) -> None:
        for hook in (*self.trainer_hooks, *self.users):
            self._call(hook, method, *arguments)

    def setup(self, job: JobOfHooks, trainer_hooks: Sequence[TrainerHook] = ()) -> None:
        """`trainer_hooks`: hooks of the trainer. They come before those of `[run] hooks`."""
        self.trainer_hooks = trainer_hooks
        for hook in (*self.trainer_hooks, *self.users):
            before = hook_count(job.model)
            self._call(hook, "setup", job)
            if job.config.train.cuda_graph and hook_count(job.model) != before:
                raise UserError(
                    f"train.cuda_graph: expected false with hook {hook.name!r}, which registers hooks on modules or "
                    "parameters, found true; a graph calls no such hook. Read p.grad in the method metrics"
                )

    def end_run(self, reason: str) -> None:
        """End the run early. The first reason stays."""
        self._end_reason = self._end_reason or reason

    @property
    def stops_early(self) -> bool:
        """Whether a hook of this rank has ended the run."""
        return bool(self._end_reason)

    def stop_reason(self) -> str:
        """Return the reason of the first rank whose hook has ended the run. Called by all ranks together."""
        reasons = RankGroup().all_gather(self._end_reason)
        return next((" ".join(reason.split()) for reason in reasons if reason), "")

    def before_step(self, step: int) -> None:
        self._all("before_step", step)

    def after_step(self, record: StepRecord) -> None:
        self._all("after_step", record)

    def saved(self, step: int) -> None:
        self._all("saved", step)

    def end(self, end: RunEnd) -> None:
        """Every hook is called, once. After an error of the run, errors of hooks are not raised."""
        if self._has_ended:
            return
        self._has_ended = True
        for hook in (*self.trainer_hooks, *self.users):
            with suppress(*([Exception] if end.status == "failed" else [])):
                self._call(hook, "end", end)

    def faults(self, step: StepInProgress) -> list[Fault]:
        """Faults that this rank's hooks report."""
        faults = []
        for hook in self.users:
            if type(hook).before_optimizer is TrainerHook.before_optimizer:
                continue
            fault = self._call(hook, "before_optimizer", step)
            if fault is not None and (not isinstance(fault, Fault) or fault.action not in ACTIONS):
                raise ExtensionError(
                    f"The method before_optimizer of hook {hook.name!r} returned {fault!r}; expected None or a Fault "
                    f"whose action is one of {', '.join(ACTIONS)}"
                )
            faults += [] if fault is None else [fault]
        return faults

    def metrics(self, step: int) -> list[float | Tensor]:
        """Sum and count of each of `step_metrics`, in their order."""
        return self._sums("metrics", "step_metrics", step)

    def validate(self, logits: Tensor, targets: Tensor) -> list[float | Tensor]:
        """Sum and count of each of `validation_metrics`, in their order."""
        return self._sums("validate", "validation_metrics", logits, targets)

    def _sums(self, method: str, key: str, *arguments: Any) -> list[float | Tensor]:
        sums_and_counts: list[float | Tensor] = []
        for hook in self.users:
            if names := getattr(hook, key):
                sums = self._call(hook, method, *arguments)
                sums_and_counts += _in_order(f"The method {method} of hook {hook.name!r}", names, sums)
        return sums_and_counts

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the hooks that have one, by their names."""
        states = {
            hook.name: self._call(hook, "state_dict")
            for hook in self.users
            if type(hook).state_dict is not TrainerHook.state_dict
        }
        for name, state in states.items():
            if not isinstance(state, dict) or not _has_tensors_in_dicts_alone(state):
                raise ExtensionError(
                    f"The method state_dict of hook {name!r} returned {state!r:.100}; expected a dict of plain values, "
                    "and of tensors and dicts of them"
                )
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for hook in self.users:
            if hook.name in states:
                self._call(hook, "load_state_dict", states[hook.name])


def _check_takes_effect(hook: TrainerHook) -> None:
    """Raise UserError for parts of a hook that nobody would call or read."""
    kind, where = type(hook), f"run.hooks: hook {hook.name!r}"
    for method, key in (("metrics", "step_metrics"), ("validate", "validation_metrics")):
        if getattr(kind, method) is not getattr(TrainerHook, method) and not getattr(hook, key):
            raise UserError(
                f"{where} has the method {method} and no names in {key}, so it is never called; expected "
                f'{key} = ("NAME",) with the names that it returns'
            )
    members = [name for name in vars(TrainerHook) if not name.startswith("_")]
    added = {name for parent in kind.__mro__ if parent not in TrainerHook.__mro__ for name in vars(parent)}
    for name in sorted(added - {*members}):
        close = difflib.get_close_matches(name, members, 1, 0.85)
        if close and not name.startswith("_") and (callable(getattr(kind, name)) or f"{name}s" in members):
            raise UserError(f"{where} has {name!r}, which nobody reads; did you mean {close[0]!r}?")
    declared = {*hook.step_metrics, *hook.validation_metrics}
    if (odd := next((name for name in hook.higher_is_better if name not in declared), None)) is not None:
        raise UserError(
            f"{where}: expected names of its metrics in higher_is_better, found {odd!r}; it has "
            f"{', '.join(sorted(declared)) or 'none'}"
        )


def _has_tensors_in_dicts_alone(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_has_tensors_in_dicts_alone, value.values()))
    return not (isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value))


def _in_order(owner: str, names: Iterable[str], sums: Sums) -> list[float | Tensor]:
    """Sum and count of each name; 0 and 0 for one that is not there.

    Raises:
        ExtensionError: it is no such mapping.
    """
    names = list(names)
    if not isinstance(sums, Mapping) or not sums.keys() <= set(names):
        raise ExtensionError(
            f"{owner} returned {sums!r:.100}; expected a dict with the keys {', '.join(names)}"
        )
    sums_and_counts: list[float | Tensor] = []
    for name in names:
        pair = sums.get(name, (0.0, 0.0))
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(map(_is_number, pair)):
            raise ExtensionError(
                f"{owner} returned {pair!r:.100} for {name!r}; expected a sum and a count: two numbers, or tensors "
                "without dimensions"
            )
        sums_and_counts += pair
    return sums_and_counts


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float)


def means(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """By name the sum by the count, of sums and counts one after another. A metric without a count is left out."""
    pairs = zip(names, sums[::2], sums[1::2], strict=True)
    return {name: total / count for name, total, count in pairs if count}


@dataclass
class JobOfHooks:
    """The job as hooks see it: `config.catalog.hooks.Job`."""

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    rank: int
    ranks: int
    say: Callable[[str], None]
    step: Callable[[], int]
    stop: Callable[[str], None]

    @property
    def steps_done(self) -> int:
        return self.step()
