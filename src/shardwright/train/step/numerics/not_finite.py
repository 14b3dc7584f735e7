"""Figures of a step that are nan or infinite: the ranks whose part of the sum is so. They travel with the sums.

Nothing here communicates, and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwright.train.errors import UserError


def marks(parts: Tensor, rank: int) -> Tensor:
    """Return a row to add up over the ranks, from this rank's numbers [figures, numbers of each]: for each figure
    whether one of its numbers is not finite, and for each figure `rank` if that is so. float64 [2 * figures]."""
    wrong = ~parts.isfinite().all(1)
    return torch.cat([wrong, wrong * rank]).double()


def wrong_ranks(names: Sequence[str], marked: Sequence[float], size: int) -> dict[str, str]:
    """Return the ranks in words, by the names of those figures that are not finite on any. `marked`: the row of
    `marks`, added up over `size` ranks."""
    counts, numbers = marked[: len(names)], marked[len(names) :]
    words = {}
    for name, count, number in zip(names, counts, numbers, strict=True):
        if count:
            words[name] = f"rank {number:.0f}" if count == 1 else f"{count:.0f} of {size} ranks"
            if count == size:
                words[name] = "all ranks" if size > 1 else ""
    return words


def in_words(name: str, value: str, step: int, ranks: Mapping[str, str]) -> str:
    """Return a figure and its value, such as "validation accuracy is nan in step 4 (rank 1)"."""
    return f"{name} is {value} in step {step}" + (f" ({ranks[name]})" if ranks.get(name) else "")


def check_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Raise UserError for a rate that a hook has set and that is nan or infinite. The host does not wait for rates that
    are tensors."""
    for number, group in enumerate(optimizer.param_groups):
        if isinstance(rate := group["lr"], float) and not math.isfinite(rate):
            raise UserError(
                f"run.hooks: expected a finite learning rate for step {step}, found {rate} in group {number} of the "
                "optimizer after before_step of the hooks; correct the hook that sets it"
            )
