"""Mistakes with optimizers and clipping beside a sharded model: the error says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.support import multirank, world_mesh


@multirank(2)
def test_an_optimizer_of_another_model_is_refused(rank: int, world_size: int) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sw.fully_shard(model, mesh=world_mesh(world_size))
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="None of the 2 parameters of this SGD belongs to a sharded model"):
        sw.fully_shard_optimizer(other)
    mixed = torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()], lr=0.1)
    assert sw.fully_shard_optimizer(mixed) is mixed


@multirank(2)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_torchs_clipping_of_mixed_gradients_names_ours(
    rank: int, world_size: int, foreach: bool | None
) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sw.fully_shard(model, mesh=world_mesh(world_size), ignored_params=set(model[1].parameters()))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"sw\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)


@multirank(2)
def test_a_second_call_names_the_module(rank: int, world_size: int) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (model[0], model):
        sw.fully_shard(module, mesh=world_mesh(world_size))
    with pytest.raises(
        ValueError, match="this Linear: it is unit 'Linear', with parameters 'weight', 'bias'"
    ):
        sw.fully_shard(model[0], mesh=world_mesh(world_size))
    model(torch.ones(1, 4))
    with pytest.raises(ValueError, match="this Linear: it is unit '0', with parameters"):
        sw.fully_shard(model[0], mesh=world_mesh(world_size))


@multirank(2)
def test_the_group_says_whether_the_full_weights_are_there(rank: int, world_size: int) -> None:
    model: Any = nn.Linear(4, 4)
    sw.fully_shard(model, mesh=world_mesh(world_size))
    group = model._get_fsdp_state()._fsdp_param_group
    seen = []
    model.register_forward_hook(lambda *_: seen.append(group.is_unsharded), prepend=True)
    assert not group.is_unsharded
    loss = model(torch.ones(1, 4)).sum()
    assert seen == [True] and group.is_unsharded  # the root keeps them until backward
    loss.backward()
    assert group.is_sharded and not group.is_unsharded
    model.unshard()
    assert group.is_unsharded
    model.reshard()
    assert group.is_sharded


@multirank(2)
def test_a_module_is_listed_once(rank: int, world_size: int) -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"one Linear at places \[0, 2\] of its list"):
        sw.fully_shard([one, other, one])
    sw.fully_shard([one, other])
