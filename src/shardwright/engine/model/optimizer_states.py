"""Optimizer state that torch makes for its state-dict functions. Reading state never changes a later step.

Before an optimizer's first step torch makes its state by a step with zero gradients and a learning rate of zero. This
file makes that step for optimizers of sharded parameters, without effect on held gradients, gradient dtypes, version
counters or random numbers. After a read the optimizer has no state again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from shardwright.engine.compat.autograd import preserve_version_counters
from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.compat.optimizers import watch_optimizer_states
from shardwright.engine.tensors.parameter import Managed, unit_of
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import complete


@functools.cache
def hook_optimizer_states() -> None:
    """Let torch's state-dict functions make and read state in this way. Done once."""
    watch_optimizer_states(_make_state, _read_state)


def zero_gradient(p: torch.Tensor) -> torch.Tensor:
    """Zeros that ``p.grad`` accepts: of the parameter's shape, in its ``grad_dtype``."""
    return torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None) or p.dtype)


def _make_state(original: Callable[..., None], optimizer: torch.optim.Optimizer) -> None:
    parameters = parameters_of(optimizer)
    units = _units(parameters)
    if not units or optimizer.state:
        original(optimizer)
        return
    for unit in units:
        complete(unit)
    if any(p.grad is not None for p in parameters):
        return  # as torch: the optimizer may have no state by its nature
    rates = [group.get("lr") for group in optimizer.param_groups]
    device = parameters[0].device
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        for unit in units:
            stack.enter_context(unit.gradients.set_aside())
        managed = [p for p in parameters if isinstance(p, Managed)]
        stack.enter_context(preserve_version_counters([*managed, *map(local_of, managed)]))
        try:
            for group in optimizer.param_groups:
                if "lr" in group:
                    group["lr"] = 0.0
            for p in parameters:
                if p.requires_grad:
                    p.grad = zero_gradient(p)
            optimizer.step()
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if "lr" in group:
                    group["lr"] = rate
            for p in parameters:
                p.grad = None


def _read_state(
    original: Callable[..., Any], model: Any, optimizers: Sequence[torch.optim.Optimizer], *info: Any
) -> Any:
    without_state = [each for each in optimizers if not each.state and _units(parameters_of(each))]
    try:
        return original(model, optimizers, *info)
    finally:
        for optimizer in without_state:
            optimizer.state.clear()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _units(parameters: Iterable[torch.Tensor]) -> list[Unit]:
    units = {id(u): u for p in parameters if isinstance(p, Managed) and (u := unit_of(p)) is not None}
    return list(units.values())
