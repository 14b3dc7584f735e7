"""Connects a fault plan to the trainer of this process, and writes what the rank does to the history.

The trainer's classes are wrapped, in a process that was forked for one attempt. Its own code is unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.train.data.samples.loader import Loader
from shardwright.train.step import loop, session, trainer as trainer_module
from shardwright.train.step.saving.saves import Saves
from shardwright.train.step.trainer import Trainer
from tools.faults.points import Fault, Plan, count_calls

INSIDE = Path(__file__).parent / "inside"
ROOT = Path(__file__).parents[2]


def plant(plan: Plan, fault: Fault | None) -> None:
    """From here on the trainer of this process passes the plan's points."""
    _Planting(plan)
    if fault is not None and fault.phase == "write" and fault.rank == plan.history.rank:
        place = plan.history.place
        facts = {"fault": vars(fault), "run": place.run, "attempt": place.attempt, "source": str(ROOT)}
        os.environ["FAULT_IN_WRITER"] = json.dumps({**facts, "history": str(plan.history.path)})
        sys.path.insert(1, str(INSIDE))  # writer processes get this path


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of this rank's parts of the parameters, of the buffers and of the optimizer's tensors."""
    result = hashlib.sha256()
    for tensor in _tensors(model, optimizer):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        result.update(local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return result.hexdigest()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            yield from (state[key] for key in sorted(state) if isinstance(state[key], Tensor))


class _Planting:
    """The wrapped trainer: its points are those of ``plan``."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.history = plan, plan.history
        self.step = 0  #: that is being done, from 1; 0 before the first one
        self.saving = False
        self.calls = 0  #: of the save under way
        self.rows: list[int] = []  #: a checksum of each sample of the step
        _wrap(Trainer, "__init__", self._built)
        _wrap(Trainer, "load", self._load)
        _wrap(Trainer, "train_step", self._train_step)
        _wrap(trainer_module, "add_up", self._before("reduce"))
        _wrap(loop, "validate", self._before("validate"))
        _wrap(Loader, "__next__", self._data)
        _wrap(Trainer, "clip_gradients", self._before("clip"))
        _wrap(Saves, "save", self._save)
        _wrap(Saves, "_saved", self._saved)
        _wrap(session, "conclude", self._before("conclude"))
        register_optimizer_step_pre_hook(lambda *rest: self.plan.at("optimizer", self.step))
        count_calls(self._call, lambda: self.saving)

    def _before(self, phase: str) -> Callable[..., Any]:
        def wrapper(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            self.plan.at(phase, self.step)
            return original(*arguments, **options)

        return wrapper

    def _built(self, original: Callable[..., Any], trainer: Trainer, *arguments: Any, **options: Any) -> None:
        original(trainer, *arguments, **options)
        blocks = next(each for each in trainer.model.modules() if isinstance(each, nn.ModuleList))
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(
                lambda *rest, number=number: self.plan.at("forward", self.step, number)
            )
            block.register_forward_hook(functools.partial(self._backward_of, number))

    def _backward_of(self, number: int, block: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: self.plan.at("backward", self.step, number))

    def _load(self, original: Callable[..., Any], trainer: Trainer, *arguments: Any) -> Any:
        self.plan.at("load", 0)
        loaded = original(trainer, *arguments)
        self.history.add(
            "resumed", step=trainer.position.step, digest=digest(trainer.model, trainer.optimizer)
        )
        self.plan.at("loaded", 0)
        return loaded

    def _data(self, original: Callable[..., Any], loader: Loader) -> Any:
        self.plan.at("data", self.step)
        data = original(loader)
        self.rows = [zlib.crc32(row.numpy()) for batch in data.batches for row in batch.inputs]
        return data

    def _train_step(self, original: Callable[..., Any], trainer: Trainer, *arguments: Any) -> Any:
        self.step = trainer.position.step + 1
        result = original(trainer, *arguments)
        found = digest(trainer.model, trainer.optimizer)
        self.history.add("step", step=self.step, digest=found, loss=result.loss, rows=self.rows)
        self.plan.at("after", self.step)
        return result

    def _save(self, original: Callable[..., Any], saves: Saves, *arguments: Any, **options: Any) -> None:
        self.saving, self.calls = True, 0
        try:
            original(saves, *arguments, **options)
        finally:
            self.saving = False
        self.history.add("calls", step=self.step, calls=self.calls)

    def _saved(self, original: Callable[..., Any], saves: Saves, step: int) -> None:
        if self.history.rank == 0:
            self.history.add("saved", step=step)
        self.plan.at("saved", self.step)
        original(saves, step)

    def _call(self, number: int) -> None:
        self.calls += 1
        self.plan.at("call", self.step, self.calls)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return wrapper(original, *arguments, **options)

    setattr(owner, name, wrapped)
