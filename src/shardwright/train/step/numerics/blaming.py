"""Finds the rank that computed a gradient which is not finite, by doing the work of the step again and looking at each
rank's own gradients before they are reduced.

After the reduction all ranks have such values, or the one that stores that part of the gradient. Nothing here decides
what a run does about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.engine import RankGroup, names_in, plain_tensors, units_of
from shardwright.train.config import Config
from shardwright.train.step.numerics.replaying import replay


class _RankGradient(NamedTuple):
    """A gradient that a rank computed in one micro-batch."""

    name: str  #: of the parameter
    unit: str | None
    largest: Tensor  #: absolute value, 0-d; not finite if any value is not


class Suspect(NamedTuple):
    """The first gradient of a rank that is not finite, or else its largest one. The least of several is the culprit."""

    place: int  #: in the order of backward
    rank: int
    name: str  #: the parameter and its unit in words
    largest: float  #: absolute value

    @property
    def is_finite(self) -> bool:
        return self.largest < float("inf")  # False for nan


class Blame(NamedTuple):
    """The gradients of all ranks, before they are reduced."""

    suspect: Suspect  #: the first gradient that is not finite, or else the largest one
    wrong_ranks: list[int]  #: whose gradients are not finite; empty if all are finite

    @property
    def in_words(self) -> str:
        suspect, ranks = self.suspect, self.wrong_ranks
        if ranks:
            others = f" (such ranks: {', '.join(map(str, ranks))})" if len(ranks) > 1 else ""
            return (
                f"gradient of {suspect.name}, the first one in the order of backward, is not finite on rank "
                f"{suspect.rank}, which computed it{others}"
            )
        return (
            "computed again, all gradients are finite on all ranks before they are reduced; the largest, "
            f"{suspect.largest:.3g}, is the gradient of {suspect.name} on rank {suspect.rank}"
        )


def hooks_see_gradients(config: Config) -> bool:
    """Whether hooks see a rank's gradients before they are reduced. A CUDA graph calls no hooks."""
    return config.parallel.facts.shows_gradients and not config.train.cuda_graph


@torch.no_grad()
def computed_by(
    model: nn.Module, optimizer: torch.optim.Optimizer, work: Callable[[], Tensor], rank: int
) -> Blame | None:
    """The rank whose own gradient is not finite, or is the largest; None without any gradient.

    `work` does forward and backward of the step again. Called by all ranks together, with no gradient left that is
    still needed. `hooks_see_gradients` must hold.
    """
    optimizer.zero_grad(set_to_none=True)
    with _own_gradients(model) as gradients, replay(model, optimizer), torch.enable_grad():
        work()
    suspects = [each for each in RankGroup().all_gather(_suspect_of(gradients, rank)) if each is not None]
    if not suspects:
        return None
    wrong = [suspect for suspect in suspects if not suspect.is_finite]
    if wrong:
        return Blame(min(wrong), sorted(suspect.rank for suspect in wrong))
    return Blame(max(suspects, key=lambda suspect: (suspect.largest, -suspect.rank)), [])


def _suspect_of(gradients: Sequence[_RankGradient], rank: int) -> Suspect | None:
    """This rank's suspect; None without any gradient."""
    suspects = [
        Suspect(place, rank, _in_words(gradient), float(gradient.largest))
        for place, gradient in enumerate(gradients)
    ]
    first_wrong = next((suspect for suspect in suspects if not suspect.is_finite), None)
    return first_wrong or max(suspects, key=lambda suspect: suspect.largest, default=None)


def _in_words(gradient: _RankGradient) -> str:
    return gradient.name if gradient.unit is None else f"{gradient.name} (unit {gradient.unit})"


@contextmanager
def _own_gradients(model: nn.Module) -> Iterator[list[_RankGradient]]:
    """This rank's gradients of the backwards inside the context, before they are reduced, in their order."""
    gradients: list[_RankGradient] = []
    names, managed, handles = names_in(model), set(), []
    for unit in units_of(model):
        for p in unit.parameters:
            managed.add(id(p.sharded))
            if p.full.requires_grad:
                name = names.get(id(p.sharded), p.name)
                handles.append(p.full.register_hook(_keeps(gradients, name, unit.name)))
    for parameter in model.parameters():
        if id(parameter) not in managed and parameter.requires_grad:
            handles.append(parameter.register_hook(_keeps(gradients, names[id(parameter)], None)))
    try:
        yield gradients
    finally:
        for handle in handles:
            handle.remove()


def _keeps(gradients: list[_RankGradient], name: str, unit: str | None) -> Any:
    def keep(gradient: Tensor | None) -> None:
        if gradient is None:
            return
        with torch.no_grad():
            parts = [
                each for each in plain_tensors(gradient.detach()) if each.is_floating_point() and each.numel()
            ]
            for each in parts:
                gradients.append(_RankGradient(name, unit, each.abs().max()))

    return keep
