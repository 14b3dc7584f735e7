"""Modules and parameters that are used outside their unit, or put into another unit after ``fully_shard``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

import shardwright as sw
from tests.engine.kit.models import full
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@multirank(2)
def test_a_module_is_called_outside_its_unit(rank: int, world_size: int) -> None:
    plain = Pair()
    x = torch.randn(2, 4)
    for layout in ("per_parameter", "ragged"):
        model: Any = sw.fully_shard(copy.deepcopy(plain), layout=layout)
        weight, bias = full(model.a.weight), full(model.a.bias)
        torch.testing.assert_close(model.a(x), nn.functional.linear(x, weight, bias))
        model(x).sum().backward()


@multirank(2)
def test_modules_that_change_their_unit_train_on(rank: int, world_size: int) -> None:
    for layout in ("per_parameter", "ragged"):
        torch.manual_seed(0)
        plain: Any = nn.Sequential(Pair(), Pair(), Pair())
        model: Any = copy.deepcopy(plain)
        for pair in model:
            sw.fully_shard(pair, layout=layout)
        sw.fully_shard(model, layout=layout)
        # State of an optimizer is cut as its parameter was; a ragged layout cuts a parameter that moves otherwise.
        kind: Any = torch.optim.AdamW if layout == "per_parameter" else torch.optim.SGD
        optimizers = [kind(m.parameters(), lr=0.1) for m in (model, plain)]
        for step in range(4):
            for each in (model, plain):
                if step == 1:  # exchanged
                    each[0].a, each[2].a = each[2].a, each[0].a
                if step == 2:  # moved one way
                    each[1].a, each[2].b = nn.Identity(), each[1].a
                if step == 3:  # to the outermost unit
                    each.append(each[0].b)
                    each[0].b = nn.Identity()
            for r in range(world_size):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + r))
                if r == rank:
                    model(x).square().mean().backward()
                (plain(x).square().mean() / world_size).backward()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(
                    full(p.grad), q.grad, msg=lambda m, n=name, s=step: f"{s} {n}: {m}"
                )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(full(p.detach()), q.detach(), msg=lambda m, n=name: f"{n}: {m}")
            state = {name: full(value) for name, value in model.state_dict().items()}
            torch.testing.assert_close(state, dict(plain.state_dict()))


COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": lambda p: dist.all_reduce(p),
    "broadcast": lambda p: dist.broadcast(p.data, 0),
    "all_gather": lambda p: dist.all_gather([torch.zeros(4, 4) for _ in range(2)], p.data),
    "functional": lambda p: functional_all_reduce(p.detach(), "sum", dist.group.WORLD),
}


@pytest.mark.skipif(not subclasses_dispatch, reason="DTensors reach no operator here")
@multirank(2)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_of_a_sharded_parameter_is_refused(rank: int, world_size: int, name: str) -> None:
    model: Any = sw.fully_shard(Pair())
    with pytest.raises(RuntimeError, match=r"'a.weight' of unit 'Pair' is sharded.* takes plain tensors"):
        COLLECTIVES[name](model.a.weight)


@pytest.mark.skipif(not subclasses_dispatch, reason="DTensors reach no operator here")
@multirank(2)
def test_ddp_around_a_sharded_model_is_named(rank: int, world_size: int) -> None:
    with pytest.raises(RuntimeError, match="needs no DistributedDataParallel around it"):
        nn.parallel.DistributedDataParallel(sw.fully_shard(Pair()))
