"""The learning rate of each step."""

from __future__ import annotations

import math

from shardwright.train.config import OptimizerConfig


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
