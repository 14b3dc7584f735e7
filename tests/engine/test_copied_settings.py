"""A deep copy gathers and reduces as its original does: codecs, gradient hooks, the user's own collectives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.comm_hooks import MXFP8, Compressed, Int8Blocks, PowerSGD
from tests.engine.custom import Gathers, Scatters
from tests.engine.kit.models import Model, build, full, loss_of, shard, tokens
from tests.support import multirank

GATHERS, SCATTERS = Gathers(), Scatters()


class Halved:
    """Changes gradients by an object of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def run(self, gradient: torch.Tensor) -> None:
        self.calls += 1
        gradient.mul_(0.5)


def own_collectives(model: Any) -> None:
    for unit in (*model.blocks, model):
        unit.set_custom_all_gather(GATHERS)
        unit.set_custom_reduce_scatter(SCATTERS)


SETTINGS: dict[str, Callable[[Any], None]] = {
    "codec": lambda model: model.set_all_gather_codec(Int8Blocks(32)),
    "codec of blocks": lambda model: model.set_all_gather_codec(MXFP8()),
    "compressed": lambda model: model.set_gradient_comm_hook(Compressed(Int8Blocks(32), error_feedback=True)),
    "powersgd": lambda model: model.set_gradient_comm_hook(PowerSGD(1)),
    "own collectives": own_collectives,
    "separate groups": lambda model: model.set_separate_reduce_scatter_group(),
    "all-reduce hook": lambda model: model.blocks[0].set_all_reduce_hook(Halved().run),
}


def step(model: Model, rank: int, number: int) -> list[torch.Tensor]:
    """One step of plain SGD. What optimizers keep would not be copied with a model."""
    batch = tokens(number, 0, rank)
    loss_of(model(batch), batch).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1)
            p.grad = None
    return [full(p).detach().clone() for p in model.parameters()]


@pytest.mark.extensive("both strategies", but=("zero3-*",))
@multirank(2)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_copy_goes_on_as_its_original_would(rank: int, world_size: int, strategy: str) -> None:
    """To the bit: what a hook has kept of lost gradients, too."""
    plain = shard(build(dim=32, hidden=64), strategy=strategy)
    for number in range(5):
        last = step(plain, rank, number)
    for name, apply in SETTINGS.items():
        model = shard(build(dim=32, hidden=64), strategy=strategy)
        apply(model)
        for number in range(3):
            step(model, rank, number)
        calls = GATHERS.calls
        twin = copy.deepcopy(model)
        results = [[step(each, rank, number) for number in (3, 4)] for each in (model, twin)]
        assert all(
            torch.equal(a, b)
            for one, two in zip(*results, strict=True)
            for a, b in zip(one, two, strict=True)
        ), name
        exact = name in ("own collectives", "separate groups") or (
            name.startswith("codec") and strategy == "ddp"
        )
        assert all(torch.equal(a, b) for a, b in zip(results[0][-1], last, strict=True)) == exact, name
        if name == "own collectives" and strategy == "zero3":
            assert (
                GATHERS.calls - calls == 2 * 2 * 5
            )  # two models, two steps, two blocks twice and the root once


class Bound(sw.comm_hooks.GradientHook):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        self.group = dist.group.WORLD


@multirank(2)
def test_a_hook_that_cannot_be_copied_is_named(rank: int, world_size: int) -> None:
    model = shard(build())
    model.set_gradient_comm_hook(Bound())
    with pytest.raises(RuntimeError, match="cannot be copied, since its gradient hook Bound cannot"):
        copy.deepcopy(model)
