"""Random numbers in place of replicated parameters: ranks with different seeds get an error, not different replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh

DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda p: p.normal_(),
    "uniform_": lambda p: p.uniform_(-1, 1),
    "bernoulli_": lambda p: p.bernoulli_(0.5),
    "exponential_": lambda p: p.exponential_(),
    "random_": lambda p: p.random_(0, 99),
    "data": lambda p: p.data.normal_(),
    "detached": lambda p: p.detach().normal_(),
    "row": lambda p: p[1].normal_(),
    "init.normal_": lambda p: nn.init.normal_(p),
    "init.kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p),
    "init.xavier_normal_": lambda p: nn.init.xavier_normal_(p),
    "init.trunc_normal_": lambda p: nn.init.trunc_normal_(p),
    "generator": lambda p: p.normal_(generator=torch.Generator().manual_seed(torch.initial_seed())),
    "added": lambda p: p.add_(torch.randn_like(p)),
}
REPLICATED: tuple[tuple[str, tuple[int, ...]], ...] = (("ddp", (4,)), ("hsdp", (2, 2)), ("ddp", (2, 2)))


def build(strategy: str, shape: tuple[int, ...]) -> Any:
    torch.manual_seed(0)
    mesh = world_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    return sw.fully_shard(nn.Linear(6, 7), mesh=mesh, strategy=strategy)


def replicas_agree(local: torch.Tensor, columns: int) -> bool:
    """Whether ranks that keep the same elements have equal ones."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    return all(torch.equal(each, everyone[i % columns]) for i, each in enumerate(everyone))


@pytest.mark.extensive("each way of drawing")
@multirank(4, timeout=120)
def test_replicas_are_drawn_equal_or_not_at_all(rank: int, world_size: int) -> None:
    for strategy, shape in REPLICATED:
        columns = 2 if strategy == "hsdp" else 1
        for name, draw in DRAWS.items():
            for seed in (7, rank, rank // 2):
                model = build(strategy, shape)
                torch.manual_seed(seed)
                refused = False
                with torch.no_grad():
                    try:
                        draw(model.weight)
                    except RuntimeError as error:
                        assert "'weight' of unit 'Linear'" in str(error) and "torch.manual_seed" in str(
                            error
                        ), name
                        refused = True
                where = (strategy, shape, name, seed)
                assert replicas_agree(model.weight.to_local(), columns), where
                assert not refused or seed != 7, where


@multirank(4)
def test_equal_seeds_give_the_numbers_of_the_plain_parameter(rank: int, world_size: int) -> None:
    for strategy, shape in REPLICATED:
        for name in ("normal_", "uniform_", "init.trunc_normal_", "generator"):
            model, plain = build(strategy, shape), nn.Linear(6, 7)
            for each in (model, plain):
                torch.manual_seed(3)
                with torch.no_grad():
                    DRAWS[name](each.weight)
            assert torch.equal(full(model.weight.detach()), plain.weight), (strategy, shape, name)


@multirank(2)
def test_shards_may_be_drawn_with_different_seeds(rank: int, world_size: int) -> None:
    """No element is on two ranks."""
    model = build("zero3", (2,))
    torch.manual_seed(rank)
    nn.init.normal_(model.weight)
    replicated = build("ddp", (2,))
    torch.manual_seed(rank)
    with pytest.raises(RuntimeError, match="different states"):
        nn.init.normal_(replicated.weight)
