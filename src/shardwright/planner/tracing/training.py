"""Phases of a training loop, and the names of its modules and tensors, from the models and optimizers that it calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwright.engine import Unit, plain_tensors, units_of
from shardwright.engine.compat import in_backward, local_of
from shardwright.planner.program import AFTER_OPTIMIZER, OPTIMIZER
from shardwright.planner.tracing.recorder import ProgramRecorder

SHOWN = 3
"""Parameters of a unit that are named."""


class Calls:
    """Hooks of calls of all modules, which go to the loop that is watched. Traces that share graphs share them, too:
    torch.compile makes other graphs for other hooks."""

    def __init__(self) -> None:
        self.training: Training | None = None

    def enter(self, module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and self.training is not None:
            self.training.enter(module)

    def forget(self) -> None:
        self.training = None

    def leave(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self.training is not None:
            self.training.leave()


@contextmanager
def watch_calls() -> Iterator[Calls]:
    """Let calls of modules go to the hooks inside this context."""
    calls = Calls()
    with ExitStack() as stack:
        for handle in (
            register_module_forward_pre_hook(calls.enter),
            register_module_forward_hook(calls.leave, always_call=True),
        ):
            stack.callback(handle.remove)
        yield calls


@contextmanager
def watch_training(recorder: ProgramRecorder, calls: Calls | None = None) -> Iterator[Training]:
    """Note phases inside this context, and give blocks the names of the tensors and modules that need them."""
    training = Training(recorder)
    with ExitStack() as stack:
        calls = calls or stack.enter_context(watch_calls())
        calls.training = training
        stack.callback(calls.forget)  # the next trace must not find this one's models
        for handle in (
            register_optimizer_step_pre_hook(training.before_step),
            register_optimizer_step_post_hook(training.after_step),
        ):
            stack.callback(handle.remove)
        yield training


class Training:
    """The models and optimizers of a loop: modules that are called from outside, and optimizers that make a step."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder
        self._models: list[nn.Module] = []
        self._names: dict[nn.Module, str] = {}
        self._steps: Counter[Optimizer] = Counter()
        self._trains = True

    @contextmanager
    def between_steps(self, phase: str) -> Iterator[None]:
        """Count everything to one phase inside this context, also the forward of models."""
        self._recorder.phase(phase)
        self._trains = False
        try:
            yield
        finally:
            self._trains = True

    def check(self) -> None:
        """Raise ValueError for a loop whose steps do not show what a later step needs."""
        if not self._models:
            raise ValueError("expected a loop that calls a model, found none")
        for optimizer, steps in self._steps.items():
            if steps == 1:
                raise ValueError(
                    f"expected two steps of each optimizer, found one of {type(optimizer).__name__}: the optimizer "
                    "makes its state in the first one, so the second one needs more memory"
                )

    @torch.no_grad()
    def claim(self) -> None:
        """Note which blocks have parameters, buffers and the states of optimizers."""
        names: dict[Any, str] = {}
        for model in self._models:
            names |= {parameter: name for name, parameter in model.named_parameters()}
            named = [*model.named_parameters(), *model.named_buffers()]
            plain = (
                (name, each)
                for name, tensor in named
                for each in plain_tensors(tensor)
                if each.ndim or not tensor.ndim  # without scales of weights in float8
            )
            self._recorder.claim("parameters", plain)
        for optimizer in self._optimizers():
            for parameter, state in optimizer.state.items():
                name = names.get(parameter, "")
                tensors = list(_tensors(state))
                self._recorder.claim("optimizer", ((name, each) for each in tensors))
                if self._recorder.is_on_host(_local(parameter)):  # the host has its state, too
                    self._recorder.put_on_host(tensors)

        for unit in (unit for model in self._models for unit in units_of(model)):
            self._recorder.parameters_of_units[unit.name] = _parameters_in_words(unit, names)

    def _optimizers(self) -> Iterable[Any]:
        """Return those that have made a step, also within backward, where torch calls no hooks of optimizers."""
        steppings = (unit.stepping for model in self._models for unit in units_of(model))
        within = (stepper for each in steppings if each is not None for stepper in each.steppers)
        return dict.fromkeys([*self._steps, *within])

    def _claim_gradients(self) -> None:
        for model in self._models:
            gradients = ((name, p.grad) for name, p in model.named_parameters())
            self._recorder.claim(
                "gradients", ((name, _local(each)) for name, each in gradients if each is not None)
            )

    # -- hooks

    def enter(self, module: nn.Module) -> None:
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                "no plan covers DistributedDataParallel, whose reductions are not visible: plan with sw.fully_shard("
                "model, strategy='ddp')"
            )
        if module not in self._names:
            self._models.append(module)
            for name, each in module.named_modules():
                self._names.setdefault(each, name)
        self._recorder.modules.append(self._names[module])
        if self._trains and self._recorder.current_phase not in ("forward", "backward"):
            self._recorder.phase("forward")

    def leave(self) -> None:
        if self._recorder.modules:  # torch also calls this if `enter` has raised an error
            self._recorder.modules.pop()

    def before_step(self, *_: Any) -> None:
        if not in_backward():  # where an optimizer steps unit by unit
            self._claim_gradients()
            self._recorder.phase(OPTIMIZER)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._steps[optimizer] += 1
        if not in_backward():
            self.claim()
            self._recorder.phase(AFTER_OPTIMIZER)


def _parameters_in_words(unit: Unit, names: Mapping[Any, str]) -> str:
    """Return the largest parameters of a unit with their shapes on this rank, as they are gathered.

    ``names``: of sharded parameters.
    """
    largest = sorted(unit.parameters, key=lambda p: -p.view.numel())
    shown = [
        f"{names.get(p.sharded, p.name).removeprefix(f'{unit.name}.')} {list(p.view.shape)}"
        for p in largest[:SHOWN]
    ]
    more = len(largest) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if hasattr(tensor, "_local_tensor") else tensor


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield _local(value)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
