"""Looks for silent corruption at the steps that `[fault] verify_every` divides: by doing a step's work twice, and by
comparing what several ranks have copies of.

All ranks come here at the same steps. `shardwright.engine.front.corruption` makes the hashes that are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.collective import RankGroup
from shardwright.engine.front.corruption import OWN, HashKey, state_hashes
from shardwright.train.config import Config
from shardwright.train.errors import JobError, UserError
from shardwright.train.run.position import Position
from shardwright.train.step.numerics.replaying import replay

SHOWN = 3
"""Differences that a message names."""
Work = Callable[[], Tensor]


class CorruptionError(JobError):
    """Values have changed, or a rank computes wrongly. Nothing may be saved. On all ranks alike."""

    status = UserError.PASSING


class VerifiedTrainer(Protocol):
    """Attributes of a trainer that this module reads."""

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    position: Position


def is_due(trainer: VerifiedTrainer) -> bool:
    """Whether the next step is verified."""
    every = trainer.config.fault.verify_every
    return every > 0 and (trainer.position.step + 1) % every == 0


def twice(trainer: VerifiedTrainer, trial: Work, work: Work) -> Tensor:
    """Do the work of a step, after a trial of it whose gradients are dropped, and compare all bits of the gradients.

    `trial` and `work` compute the same. With an optimizer that steps in backward `trial` must not step.

    Raises, on all ranks:
        CorruptionError: gradients differ, or weights or optimizer state changed during the trial, or copies differ.
        UserError: the ranks compute other gradients each time.
    """
    before = state_hashes(trainer.model, [trainer.optimizer])
    moving: set[str] = set()
    first = _hashed(trainer, trial, moving)
    changed = _changed(before, state_hashes(trainer.model, [trainer.optimizer]))
    if changed:
        _refuse(trainer, changed, "changed while nothing writes it")
    with sw.hash_gradients(trainer.model, own=not trainer.config.train.cuda_graph) as second:
        sums = work()
    in_backward = trainer.config.optimizer.in_backward
    if in_backward:  # which frees gradients, in the trial they stay
        first.reduced.clear()
        second.reduced.clear()
    if not in_backward and (changed := _changed(before, state_hashes(trainer.model, [trainer.optimizer]))):
        _refuse(trainer, changed, "changed while nothing writes it")  # this explains gradients that differ
    if differences := sw.compare_gradients(first, second):
        if not in_backward:
            trainer.optimizer.zero_grad(set_to_none=True)
            _refuse_random(trainer, first, second, _hashed(trainer, trial))
        _refuse(trainer, differences, "was computed twice, from equal weights and samples")
    everyones = set().union(*RankGroup().all_gather(moving))
    verify_copies(trainer, [each for name, each in trainer.model.named_buffers() if name in everyones])
    return sums


def verify_copies(trainer: VerifiedTrainer, moving: Sequence[Tensor] | None = None) -> None:
    """Compare what several ranks have copies of. Not buffers that forward changes, `moving`; None: not any.

    Raises:
        CorruptionError: some differ.
    """
    differences = sw.compare_copies(
        trainer.model, trainer.optimizer, buffers=moving is not None, without=moving or ()
    )
    if differences:
        _refuse(trainer, differences, "should be equal on all ranks that have it")


def _hashed(trainer: VerifiedTrainer, trial: Work, moving: set[str] | None = None) -> sw.GradientHashes:
    """The hashes of a trial. It leaves no gradient, and generators and buffers as they were.

    `moving` gets the names of the buffers that it has changed."""
    with (
        replay(trainer.model, trainer.optimizer, moving),
        sw.hash_gradients(trainer.model, own=not trainer.config.train.cuda_graph) as hashes,
    ):
        trial()
    return hashes


def _changed(before: dict[HashKey, int], now: dict[HashKey, int]) -> list[sw.Difference]:
    """Values whose bits differ from before, with the ranks where they do."""
    everyones = RankGroup().all_gather([key for key in before if now.get(key) != before[key]])
    found: dict[HashKey, list[int]] = {}
    for rank, keys in enumerate(everyones):
        for key in keys:
            found.setdefault(HashKey(*key), []).append(rank)
    return [sw.Difference(*key, tuple(ranks)) for key, ranks in found.items()]


def _refuse_random(
    trainer: VerifiedTrainer, first: sw.GradientHashes, second: sw.GradientHashes, third: sw.GradientHashes
) -> None:
    """Raise UserError if every rank's own gradients are different each time: then it is not one rank that is wrong."""
    differing = [
        {key for key in one.differing(other) if key.kind == OWN or not one.own}
        for one, other in ((first, second), (first, third), (second, third))
    ]
    if all(RankGroup().all_gather(bool(set.intersection(*differing)))):
        raise UserError(
            f"fault.verify_every: step {trainer.position.step + 1} has other gradients each time it is computed, on "
            "every rank, so an operation of the model is not deterministic and nothing can be verified. Call "
            "torch.use_deterministic_algorithms(True) in your model's file to find it, or set fault.verify_every to 0"
        )


def _refuse(trainer: VerifiedTrainer, differences: list[sw.Difference], what: str) -> None:
    shown = "; ".join(map(str, differences[:SHOWN]))
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    hosts = RankGroup().all_gather(os.uname().nodename)
    ranks = sorted({rank for each in differences for rank in each.ranks})
    where = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks[:SHOWN])
    raise CorruptionError(
        f"step {trainer.position.step + 1}: expected equal bits, found other ones. {shown}{more}: each {what} "
        f"({where}). The state is not saved. If it comes back, take that device out of the job"
    )
