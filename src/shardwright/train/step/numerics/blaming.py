"""Finds the rank that computed a gradient which is not finite, by doing the work of the step again and looking at each
rank's own gradients before they are reduced.

After the reduction all ranks have such values, or the one that stores that part of the gradient. Nothing here decides
what a run does about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.collective import RankGroup
from shardwright.engine.assembly.states import plain_tensors
from shardwright.engine.front.corruption import names_in
from shardwright.engine.unit.owning import units_of
from shardwright.train.config import Config
from shardwright.train.step.numerics.replaying import replay


class _Own(NamedTuple):
    """A gradient that a rank computed in one micro-batch."""

    name: str  #: of the parameter
    unit: str | None
    largest: Tensor  #: absolute value, 0-d; not finite if any value is not


class _Found(NamedTuple):
    """One rank's find: the place in the order of backward, the parameter in words, and the largest value."""

    place: int
    rank: int
    name: str
    largest: float


def hooks_see_gradients(config: Config) -> bool:
    """Whether hooks see a rank's gradients before they are reduced. A CUDA graph calls no hooks."""
    return config.parallel.facts.shows_gradients and not config.train.cuda_graph


@torch.no_grad()
def computed_by(
    model: nn.Module, optimizer: torch.optim.Optimizer, work: Callable[[], Tensor], rank: int
) -> str | None:
    """In words the rank whose own gradient is not finite, or is the largest; None without any gradient.

    `work` does forward and backward of the step again. Called by all ranks together, with no gradient left that is
    still needed. `hooks_see_gradients` must hold.
    """
    optimizer.zero_grad(set_to_none=True)
    with _own_gradients(model) as own, replay(model, optimizer), torch.enable_grad():
        work()
    values = [float(each.largest) for each in own]
    bad = [place for place, value in enumerate(values) if not value < float("inf")]
    finite = max(range(len(values)), key=values.__getitem__, default=None) if not bad else None
    shown = bad[0] if bad else finite
    found = None if shown is None else _Found(shown, rank, _in_words(own[shown]), values[shown])
    everyones = [each for each in RankGroup().all_gather(found) if each is not None]
    wrong = [_Found(*each) for each in everyones if not each[3] < float("inf")]
    if wrong:
        first = min(wrong)
        ranks = sorted(each.rank for each in wrong)
        others = f" (such ranks: {', '.join(map(str, ranks))})" if len(ranks) > 1 else ""
        return (
            f"gradient of {first.name}, the first one in the order of backward, is not finite on rank {first.rank}, "
            f"which computed it{others}"
        )
    largest = max(
        (_Found(*each) for each in everyones), key=lambda each: (each.largest, -each.rank), default=None
    )
    if largest is None:
        return None
    return (
        f"computed again, all gradients are finite on all ranks before they are reduced; the largest, "
        f"{largest.largest:.3g}, is the gradient of {largest.name} on rank {largest.rank}"
    )


def _in_words(own: _Own) -> str:
    return own.name if own.unit is None else f"{own.name} (unit {own.unit})"


@contextmanager
def _own_gradients(model: nn.Module) -> Iterator[list[_Own]]:
    """This rank's gradients of the backwards inside the context, before they are reduced, in their order."""
    own: list[_Own] = []
    names, managed, handles = names_in(model), set(), []
    for unit in units_of(model):
        for p in unit.parameters:
            managed.add(id(p.sharded))
            if p.full.requires_grad:
                name = names.get(id(p.sharded), p.name)
                handles.append(p.full.register_hook(_keeps(own, name, unit.name)))
    for parameter in model.parameters():
        if id(parameter) not in managed and parameter.requires_grad:
            handles.append(parameter.register_hook(_keeps(own, names[id(parameter)], None)))
    try:
        yield own
    finally:
        for handle in handles:
            handle.remove()


def _keeps(own: list[_Own], name: str, unit: str | None) -> Any:
    def keep(gradient: Tensor | None) -> None:
        if gradient is None:
            return
        with torch.no_grad():
            parts = [
                each for each in plain_tensors(gradient.detach()) if each.is_floating_point() and each.numel()
            ]
            for each in parts:
                own.append(_Own(name, unit, each.abs().max()))

    return keep
