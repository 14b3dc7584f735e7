"""Optimizers built before the model is sharded follow its parameters; those left behind say so."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.init.models import full
from tests.support import multirank


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [model[0].bias, model[2].bias], "lr": 0.02}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=0.01),
    "adagrad": lambda model: torch.optim.Adagrad(groups(model), lr=0.01, initial_accumulator_value=0.5),
    "muon": lambda model: torch.optim.Muon(
        [{"params": [p for p in model.parameters() if p.ndim > 1], "lr": 0.01}], weight_decay=0.2
    ),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


@multirank(1, 2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_groups_options_and_state_follow(rank: int, world_size: int, kind: str, layout: str) -> None:
    make = OPTIMIZERS[kind]
    torch.manual_seed(0)
    plain = build()
    expected = make(plain)
    train(plain, expected, range(5))
    for begin in ("deferred", "meta", "whole"):
        if (begin, kind) == ("meta", "adagrad"):
            continue  # its state is made at once and lost there: refused below
        torch.manual_seed(0)
        if begin == "deferred":
            with sw.deferred_init():
                model = build()
        else:
            with torch.device("meta" if begin == "meta" else "cpu"):
                model = build()
        optimizer = make(model)
        if begin == "whole":
            train(model, optimizer, range(2))
        sw.fully_shard(model[0], layout=layout)
        sw.fully_shard(model, layout=layout)
        if begin == "whole":
            with pytest.raises(RuntimeError, match=r"from before the model was sharded"):
                optimizer.step()
        assert sw.fully_shard_optimizer(optimizer) is optimizer
        sw.materialize(model)
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in expected.param_groups]
        train(model, optimizer, range(2 if begin == "whole" else 0, 5))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            # Sums over ranks and partitions round differently.
            torch.testing.assert_close(full(p), q, rtol=1e-4, atol=1e-6, msg=lambda m, b=begin: f"{b}: {m}")


@multirank(2)
def test_state_that_has_no_values_is_refused(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = build()
    optimizer = OPTIMIZERS["adagrad"](model)
    sw.fully_shard(model)
    with pytest.raises(
        ValueError, match=r"state 'sum' of parameter '0.weight of Sequential' is on the meta device"
    ):
        sw.fully_shard_optimizer(optimizer)


@multirank(2)
def test_an_optimizer_made_before_there_were_shards(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"None of the 4 parameters of this SGD belongs to a sharded model"):
        sw.fully_shard_optimizer(optimizer)
    train(model, optimizer, range(2))
    sw.fully_shard(model)
    with pytest.raises(
        RuntimeError, match=r"The state 'momentum_buffer' of this SGD is that of a whole parameter"
    ):
        optimizer.step()
    sw.fully_shard_optimizer(optimizer)
    before = full(model[0].weight).clone()
    train(model, optimizer, range(2))
    assert not torch.equal(full(model[0].weight), before)


def test_unsharded_models_keep_their_parameters() -> None:
    torch.manual_seed(0)
    plain = build()
    train(plain, expected := OPTIMIZERS["adamw"](plain), range(3))
    torch.manual_seed(0)
    with sw.deferred_init():
        model = build()
    optimizer = OPTIMIZERS["adamw"](model)
    assert len(expected.param_groups) == len(optimizer.param_groups)
    sw.materialize(model)
    train(model, optimizer, range(3))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_steps_without_values_are_refused() -> None:
    sw.materialize(nn.Linear(2, 2))  # this process has used the library
    with sw.deferred_init():
        model, recurrent = build(), nn.LSTM(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *recurrent.parameters()])
    with pytest.raises(RuntimeError, match=r"holds a deferred parameter of shape \(7, 5\)"):
        optimizer.step()
    sw.materialize(model)
    sw.materialize(recurrent)
    optimizer.step()  # LSTM refers to its weights weakly, and they are the same objects
    with sw.deferred_init():
        model = build()
    optimizer = OPTIMIZERS["adagrad"](model)
    sw.materialize(model)
    with pytest.raises(RuntimeError, match=r"state 'sum' is deferred"):
        optimizer.step()


class Slotted(nn.Parameter):
    """Python does not let an object of this class become a sharded parameter."""

    __slots__ = ("note",)


DEAD = r"Parameter '0.weight of Sequential' was used through its old object, from before fully_shard"


@multirank(1)
def test_parameters_that_die_between_steps(rank: int, world_size: int) -> None:
    """They are noticed among living ones, whatever brought them there, in every optimizer that has stepped before."""
    first, second, third = build(), build(), build()
    second[0].weight, third[0].weight = Slotted(second[0].weight.data), Slotted(third[0].weight.data)
    dead = next(third.parameters())
    sw.fully_shard(third)
    sw.fully_shard(first)
    whole = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for optimizer in (
        whole,
        sw.fully_shard_optimizer(torch.optim.SGD(whole.param_groups[0]["params"], lr=0.1)),
    ):
        train(first, optimizer, range(2))
        optimizer.param_groups[0]["params"].append(dead)
        with pytest.raises(RuntimeError, match=DEAD):
            optimizer.step()
        optimizer.param_groups[0]["params"].pop()
        optimizer.step()
        optimizer.add_param_group({"params": [dead]})
        with pytest.raises(RuntimeError, match=DEAD):
            optimizer.step()
        del optimizer.param_groups[1]
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    sw.fully_shard(second)
    with pytest.raises(RuntimeError, match=DEAD):
        whole.step()
    with sw.deferred_init():
        fourth = build()
    optimizer = torch.optim.SGD([*first.parameters(), *fourth.parameters()], lr=0.1)
    with pytest.raises(RuntimeError, match=r"holds a deferred parameter of shape \(7, 5\)"):
        optimizer.step()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    del first, second
    gc.collect()
    optimizer.step()  # whose model is gone


@multirank(1)
def test_parameters_that_to_empty_left_behind(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    sw.fully_shard(model.to_empty(device="cpu"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Every parameter of the optimizer is on the meta device"):
            optimizer.step()
