"""The differences from FSDP2 that docs/convenience.md lists: the class of each error on both sides, or none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor

import shardwright as sw
from tests.support import multirank

Shards = Callable[..., Any]


def step(model: nn.Module, width: int = 4) -> None:
    model(torch.ones(2, width)).sum().backward()


def pair(fully_shard: Shards, outer: bool = True) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model) if outer else model


def twice(fully_shard: Shards) -> None:
    fully_shard(fully_shard(nn.Linear(4, 4)))


def bias_along_dimension_1(fully_shard: Shards) -> None:
    fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(1))


def half_a_buffer(fully_shard: Shards) -> None:
    fully_shard(nn.Linear(4, 4)).set_reduce_scatter_max_input_buffers(1.5)


def true_buffers(fully_shard: Shards) -> None:
    fully_shard(nn.Linear(4, 4)).set_reduce_scatter_max_input_buffers(True)


def memory_of_gloo(fully_shard: Shards) -> None:
    model = fully_shard(nn.Linear(4, 4))
    model.set_allocate_memory_from_process_group_for_comm(True)
    step(model)


def replicate_inside(fully_shard: Shards) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replicate(model[0])
    fully_shard(model)
    step(model)


def composite(fully_shard: Shards) -> None:
    layer = nn.Linear(4, 4, bias=False)
    weight: Any = TwoTensor(layer.weight.detach(), layer.weight.detach().clone())
    layer.weight = nn.Parameter(weight)
    fully_shard(layer)


def tied(fully_shard: Shards) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    for layer in model:
        fully_shard(layer)
    step(fully_shard(model))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def without_dimensions(fully_shard: Shards) -> None:
    step(fully_shard(Scaled()))


def uneven(fully_shard: Shards) -> None:
    step(fully_shard(nn.Linear(5, 4, bias=False), shard_placement_fn=lambda p: Shard(1)), 5)


def copied(fully_shard: Shards) -> None:
    step(copy.deepcopy(fully_shard(nn.Linear(4, 4))))


def inner_before_root(fully_shard: Shards) -> None:
    model = pair(fully_shard)
    step(model[0])
    step(model)


def inner_before_outer(fully_shard: Shards) -> None:
    model = pair(fully_shard, outer=False)
    step(model[0])
    step(fully_shard(model))


#: What a user does, the error of FSDP2, that of ours.
CASES = [
    (twice, AssertionError, ValueError),
    (bias_along_dimension_1, AssertionError, ValueError),
    (half_a_buffer, TypeError, ValueError),
    (true_buffers, TypeError, ValueError),
    (memory_of_gloo, None, NotImplementedError),
    (replicate_inside, None, ValueError),
    (composite, None, ValueError),
    (tied, ValueError, None),
    (without_dimensions, ValueError, None),
    (uneven, NotImplementedError, None),
    (copied, AssertionError, None),
    (inner_before_root, RuntimeError, None),
    (inner_before_outer, RuntimeError, None),
]


@multirank(2)
def test_errors_differ_from_torchs_as_documented(rank: int, world_size: int) -> None:
    for case, theirs, ours in CASES:
        # Other versions of torch have other errors.
        both = [(fsdp2, theirs)] if torch.__version__.startswith("2.13") else []
        for fully_shard, error in (*both, (sw.fully_shard, ours)):
            if error is None:
                case(fully_shard)
                continue
            with pytest.raises(error) as caught:
                case(fully_shard)
            assert caught.type is error, (case.__name__, caught.value)
