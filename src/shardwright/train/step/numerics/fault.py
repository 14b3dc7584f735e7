"""The error of a fault, and the rule for a spike, from what all ranks know after the step's reduction.

Nothing here reads tensors or communicates, so all ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.train.config.sections.fault import FaultConfig
from shardwright.train.errors import JobError


class FaultError(JobError):
    """A fault ends the run by its settings: numbers that are not finite, a spike of the loss, or a vote of a hook."""


def is_spike(loss: float, before: Sequence[float], settings: FaultConfig) -> bool:
    """Whether a loss is far above those of the steps before it."""
    if settings.on_spike == "ignore" or len(before) < settings.spike_window // 2:
        return False
    return loss > spike_limit(before, settings.spike_sigmas)


def may_be_spike(loss: Tensor, before: Tensor, settings: FaultConfig) -> Tensor:
    """Whether `is_spike` may hold, on the device and without a wait of the host: bool, 0-d.

    It holds for all spikes, and for losses just below the limit, because sums are rounded in another order here.
    `before`: float64 [losses].
    """
    if settings.on_spike == "ignore" or len(before) < settings.spike_window // 2:
        return torch.zeros_like(loss, dtype=torch.bool)
    mean = before.mean()
    limit = mean + settings.spike_sigmas * before.std()
    return loss > limit - ROUNDING * (limit.abs() + mean.abs())


ROUNDING = 1e-9
"""The difference of two sums of the same losses in float64, as a part of them: far more than it can be."""


def spike_limit(before: Sequence[float], sigmas: float) -> float:
    """The highest loss that is no spike: the mean and so many standard deviations."""
    mean = math.fsum(before) / len(before)
    variance = math.fsum((each - mean) ** 2 for each in before) / (len(before) - 1)
    return mean + sigmas * math.sqrt(variance)
