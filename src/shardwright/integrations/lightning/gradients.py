"""Gradients under Fabric: clipping, loss scaling and micro-batches without communication.

Nothing here imports ``lightning``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from shardwright.engine import reduce_held
from shardwright.engine.comm import noted
from shardwright.engine.compat import foreach_norm, local_of
from shardwright.integrations.lightning.models import sharded_model


class GradientSync:
    """The object behind ``fabric.no_backward_sync``: gradients of a micro-batch stay on their rank."""

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        model = sharded_model(module, "no_backward_sync")
        units = model._fsdp_units(recurse=True)
        before = [unit.settings.sync for unit in units]
        model.set_requires_gradient_sync(not enabled)
        try:
            yield
        finally:
            for unit, sync in zip(units, before, strict=True):
                unit.change(sync=sync)


@torch.no_grad()
def clip_values(parameters: list[torch.Tensor], clip_val: float) -> None:
    """Clamp each element of the gradients to [-clip_val, clip_val], in the local parts."""
    reduce_held(parameters)
    for gradient in _local_gradients(parameters):
        gradient.clamp_(-float(clip_val), float(clip_val))


class Scaler(GradScaler):
    """Unscales local parts of gradients. If a value is not finite on one rank, all ranks skip the step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._unscaled: set[int] = set()

    def unscale_(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        reduce_held(parameters)
        gradients = _local_gradients(parameters)
        groups = [group["params"] for group in optimizer.param_groups]
        try:
            # The gradients of this rank, and one more for the result of all ranks.
            for group in optimizer.param_groups:
                group["params"] = []
            checked_gradients = [*gradients, _infinite_anywhere(gradients)] if gradients else []
            optimizer.param_groups[0]["params"] = [_owner_of(each) for each in checked_gradients]
            super().unscale_(optimizer)
        finally:
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = params
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if (
            self.is_enabled() and id(optimizer) not in self._unscaled
        ):  # fused optimizers would use the value before the reduction
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self._unscaled.clear()


def _owner_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has this gradient, for a scaler that takes the gradients of tensors."""
    owner = gradient.detach()
    owner.grad = gradient
    return owner


def _infinite_anywhere(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return one element that is equal on every rank: infinite if any element on any rank is not finite, else 0."""
    filled = [g for g in gradients if g.numel()]
    largest = torch.stack([n.float() for n in foreach_norm(filled, math.inf)]) if filled else torch.zeros(1)
    any_infinite = largest.isfinite().all().logical_not().float().to(gradients[0].device).view(1)
    with noted("all-reduce of a flag"):
        dist.all_reduce(any_infinite, dist.ReduceOp.MAX)
    return torch.where(any_infinite > 0, math.inf, 0.0)


def scaler_of(users_scaler: Any, device: str) -> GradScaler:
    """Return a scaler for sharded gradients with the settings of the user's. Raises TypeError for a subclass."""
    if isinstance(users_scaler, Scaler):
        return users_scaler
    if type(users_scaler) not in (GradScaler, torch.cuda.amp.GradScaler):
        raise TypeError(
            f"A {type(users_scaler).__name__} sees only this rank's gradients. Pass MixedPrecision a "
            "torch.amp.GradScaler; the strategy uses its settings."
        )
    scaler = Scaler(device=device, enabled=users_scaler.is_enabled())
    if users_scaler.is_enabled():
        scaler.load_state_dict(users_scaler.state_dict())
    return scaler


def _local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's parts of all existing gradients. Gradients of plain parameters are whole."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [local_of(g) if hasattr(g, "to_local") else g for g in gradients]
