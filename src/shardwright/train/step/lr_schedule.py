"""The learning rate of each step."""

from __future__ import annotations

import math

import torch

from shardwright.train.config import OptimizerConfig
from shardwright.train.errors import UserError


def learning_rate(step: int, steps: int, settings: OptimizerConfig) -> float:
    """Rate of step number `step` (from 0) of `steps`: rises over the warm-up to lr, then falls to min_lr_ratio * lr
    at the last step."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = (step - settings.warmup_steps) / max(1, steps - 1 - settings.warmup_steps)
    part = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * part)


def check_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Raise UserError for a rate that a hook has set and that is nan or infinite. The host does not wait for rates that
    are tensors."""
    for number, group in enumerate(optimizer.param_groups):
        if isinstance(rate := group["lr"], float) and not math.isfinite(rate):
            raise UserError(
                f"run.hooks: expected a finite learning rate for step {step}, found {rate} in group {number} of the "
                "optimizer after before_step of the hooks; correct the hook that sets it"
            )
