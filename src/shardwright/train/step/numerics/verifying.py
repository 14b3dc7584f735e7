"""Looks for silent corruption at the steps that `[fault] verify_every` divides: by doing a step's work twice, and by
comparing what several ranks have copies of.

All ranks come here at the same steps. `shardwright.engine.front.corruption` makes the hashes that are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.engine import OWN, HashKey, RankGroup, state_hashes
from shardwright.train.errors import JobError, UserError
from shardwright.train.step.numerics.replaying import replay

SHOWN = 3
"""Differences that a message names."""
Work = Callable[[], Tensor]


class CorruptionError(JobError):
    """Values have changed, or a rank computes wrongly. Nothing may be saved. On all ranks alike."""

    status = UserError.PASSING


def twice(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    trial: Work,
    work: Work,
    in_backward: bool,
    graphed: bool,
) -> Tensor:
    """Do the work of a step, after a trial of it whose gradients are dropped, and compare all bits of the gradients.

    `trial` and `work` compute the same. If the optimizer steps `in_backward`, `trial` must not step. `graphed`: a CUDA
    graph does the work.

    Raises, on all ranks:
        CorruptionError: gradients differ, or weights or optimizer state changed during the trial, or copies differ.
        UserError: the ranks compute other gradients each time.
    """
    hashes_own = not graphed
    before = state_hashes(model, [optimizer])

    def check_state_is_unchanged() -> None:
        if changed := _changed(before, state_hashes(model, [optimizer])):
            _refuse(step, changed, "changed while nothing writes it")

    def hashed_trial() -> tuple[sw.GradientHashes, set[str]]:
        """Return the hashes of a trial, and the names of the buffers that it changes. It leaves everything as it
        was."""
        moving: set[str] = set()
        with replay(model, optimizer, moving), sw.hash_gradients(model, own=hashes_own) as hashes:
            trial()
        return hashes, moving

    first, moving = hashed_trial()
    check_state_is_unchanged()
    with sw.hash_gradients(model, own=hashes_own) as second:
        sums = work()
    if in_backward:  # which frees gradients, in the trial they stay
        first.reduced.clear()
        second.reduced.clear()
    else:
        check_state_is_unchanged()  # a change explains gradients that differ
    if differences := sw.compare_gradients(first, second):
        if not in_backward:
            optimizer.zero_grad(set_to_none=True)
            _refuse_random(step, first, second, hashed_trial()[0])
        _refuse(step, differences, "was computed twice, from equal weights and samples")
    everyones = set().union(*RankGroup().all_gather(moving))
    verify_copies(
        model, optimizer, step, [buffer for name, buffer in model.named_buffers() if name in everyones]
    )
    return sums


def verify_copies(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, moving: Sequence[Tensor] | None = None
) -> None:
    """Compare what several ranks have copies of, in step `step`. Not buffers that forward changes, `moving`; None: not
    any.

    Raises:
        CorruptionError: some differ.
    """
    differences = sw.compare_copies(model, optimizer, buffers=moving is not None, without=moving or ())
    if differences:
        _refuse(step, differences, "should be equal on all ranks that have it")


def _changed(before: dict[HashKey, int], now: dict[HashKey, int]) -> list[sw.Difference]:
    """Return values whose bits differ from before, with the ranks where they do."""
    everyones = RankGroup().all_gather([key for key in before if now.get(key) != before[key]])
    ranks_of_values: dict[HashKey, list[int]] = {}
    for rank, keys in enumerate(everyones):
        for key in keys:
            ranks_of_values.setdefault(HashKey(*key), []).append(rank)
    return [sw.Difference(*key, tuple(ranks)) for key, ranks in ranks_of_values.items()]


def _refuse_random(
    step: int, first: sw.GradientHashes, second: sw.GradientHashes, third: sw.GradientHashes
) -> None:
    """Raise UserError if every rank's own gradients are different each time: then it is not one rank that is wrong."""
    differing = [
        {key for key in one.differing(other) if key.kind == OWN or not one.own}
        for one, other in ((first, second), (first, third), (second, third))
    ]
    if all(RankGroup().all_gather(bool(set.intersection(*differing)))):
        raise UserError(
            f"fault.verify_every: step {step} has other gradients each time it is computed, on "
            "every rank, so an operation of the model is not deterministic and nothing can be verified. Call "
            "torch.use_deterministic_algorithms(True) in your model's file to find it, or set fault.verify_every to 0"
        )


def _refuse(step: int, differences: list[sw.Difference], what: str) -> None:
    shown = "; ".join(map(str, differences[:SHOWN]))
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    hosts = RankGroup().all_gather(os.uname().nodename)
    ranks = sorted({rank for each in differences for rank in each.ranks})
    where = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks[:SHOWN])
    raise CorruptionError(
        f"step {step}: expected equal bits, found other ones. {shown}{more}: each {what} "
        f"({where}). The state is not saved. If it comes back, take that device out of the job"
    )
