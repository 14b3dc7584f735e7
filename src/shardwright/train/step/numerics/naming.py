"""Names the values that are not finite: of which parameter and unit, and which rank computed them.

After the reduction all ranks have a wrong gradient, or the one that stores that part of it. To find the rank that
computed it, `computed_by` does the work of the step again and looks at each rank's own gradients before they are
reduced. Every function is called by all ranks together, after a fault is known. They wait for the device, which a step
without a fault does not. Nothing here decides what a run does about a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.engine import (
    RankGroup,
    SteppedGradient,
    names_in,
    plain_name,
    plain_tensors,
    unit_name,
    units_of,
)
from shardwright.engine.compat import foreach_norm
from shardwright.train.config import ParallelConfig, TrainConfig
from shardwright.train.errors import counted
from shardwright.train.step.numerics.replaying import replay

MEANINGS = {
    "weight": "the weights",
    "optimizer": "the optimizer's state",
    "gradient": "the gradients",
    "buffer": "the buffers",
}


class Named(NamedTuple):
    """A tensor of the state, or a gradient, on this rank."""

    kind: str  #: a key of `MEANINGS`
    name: str  #: of the parameter or buffer
    key: str  #: of the optimizer's state
    unit: str | None
    tensor: Tensor


class Bad(NamedTuple):
    """A tensor with values that are not finite. The first one in this order is named."""

    kind: int
    place: int
    rank: int
    text: str


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Named]:
    """Weights, then the optimizer's state, as they are between steps; this rank's part."""
    names: dict[Tensor, str] = {each: plain_name(name, model) for name, each in model.named_parameters()}
    for weight, name in names.items():
        yield Named("weight", name, "", unit_name(weight), weight)
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield Named("optimizer", names.get(parameter, "?"), key, unit_name(parameter), value)


def gradients(model: nn.Module) -> Iterator[Named]:
    """Yield the gradients in the order of backward: what is wrong in one passes into those after it."""
    for name, parameter in reversed(list(model.named_parameters())):
        gradient = parameter.grad
        if gradient is not None and not isinstance(gradient, SteppedGradient):
            yield Named("gradient", plain_name(name, model), "", unit_name(parameter), gradient)


def floats_of(tensor: Tensor) -> list[Tensor]:
    """Return this rank's floating-point values behind a tensor, without classes of one byte, which have no
    arithmetic."""
    return [
        each.detach()  # here, because a sharded tensor takes ten times as long
        for each in plain_tensors(tensor)
        if each.is_floating_point() and each.itemsize > 1 and each.numel()
    ]


@torch.no_grad()
def is_wrong(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return whether this rank's weights or optimizer state have a value that is not finite: bool, 0-d, on the device
    of the first weight. It does not wait for the device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for named in state_tensors(model, optimizer):
        for each in floats_of(named.tensor):
            kinds.setdefault((each.device, each.dtype), []).append(each)
    device = next(iter(kinds))[0] if kinds else torch.device("cpu")
    wrong = torch.zeros((), dtype=torch.bool, device=device)
    for tensors in kinds.values():
        largest = torch.stack(foreach_norm(tensors, float("inf")))
        wrong = wrong | ~largest.isfinite().all().to(device)
    return wrong


@torch.no_grad()
def first_bad(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, kinds: tuple[str, ...]
) -> tuple[str, set[str]]:
    """Return in words the first tensor of any rank with values that are not finite, and the kinds that have such
    values."""
    bad: list[Bad] = []
    order = list(MEANINGS)
    tensors = [*state_tensors(model, optimizer), *gradients(model)]
    tensors += [
        Named("buffer", plain_name(name, model), "", None, each) for name, each in model.named_buffers()
    ]
    for place, named in enumerate(tensors):
        if named.kind not in kinds or any(each.kind == order.index(named.kind) for each in bad):
            continue
        if count := sum(int((~each.isfinite()).sum()) for each in floats_of(named.tensor)):
            bad.append(Bad(order.index(named.kind), place, rank, _in_words(named, count, rank)))
    everyones = sorted(each for found in RankGroup().all_gather(bad) for each in found)
    return (everyones[0].text if everyones else ""), {order[each.kind] for each in everyones}


def _in_words(named: Named, count: int, rank: int) -> str:
    what = {
        "weight": "weight",
        "gradient": "reduced gradient of" if RankGroup().size > 1 else "gradient of",
        "buffer": "buffer",
        "optimizer": f"optimizer state {named.key!r} of",
    }[named.kind]
    unit = "" if named.unit is None else f" (unit {named.unit})"
    first = ", the first one in the order of backward," if named.kind == "gradient" else ""
    values = counted(count, "value")
    verb = "is" if count == 1 else "are"
    return f"{what} {named.name}{unit}{first} has {values} on rank {rank} that {verb} not finite"


@torch.no_grad()
def largest_gradient(model: nn.Module, rank: int) -> str:
    """Return in words the gradient with the largest value, where all are finite and their norm is not."""
    largest: tuple[float, str] = (-1.0, "")
    for named in gradients(model):
        for each in floats_of(named.tensor):
            value = float(each.abs().max())
            if value > largest[0]:
                unit = "" if named.unit is None else f" (unit {named.unit})"
                largest = (
                    value,
                    f"all gradients are finite; the largest, {value:.3g}, is in {named.name}{unit} on rank {rank}",
                )
    return max(RankGroup().all_gather(largest), key=lambda each: each[0])[1]  # of equal ones the first rank's


def ranks_with_bad_loss(share: Tensor) -> list[int]:
    """Return the ranks whose own part of the losses is not finite."""
    finite = RankGroup().all_gather(bool(share.isfinite().all()))
    return [rank for rank, each in enumerate(finite) if not each]


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


def hooks_see_gradients(parallel: ParallelConfig, train: TrainConfig) -> bool:
    """Return whether hooks see a rank's gradients before they are reduced. A CUDA graph calls no hooks."""
    return parallel.facts.shows_gradients and not train.cuda_graph


@torch.no_grad()
def computed_by(
    model: nn.Module, optimizer: torch.optim.Optimizer, work: Callable[[], Tensor], rank: int
) -> Blame | None:
    """Return the rank whose own gradient is not finite, or is the largest; None without any gradient.

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
    """Return this rank's suspect; None without any gradient."""
    suspects = [
        Suspect(place, rank, _gradient_in_words(gradient), float(gradient.largest))
        for place, gradient in enumerate(gradients)
    ]
    first_wrong = next((suspect for suspect in suspects if not suspect.is_finite), None)
    return first_wrong or max(suspects, key=lambda suspect: suspect.largest, default=None)


def _gradient_in_words(gradient: _RankGradient) -> str:
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
