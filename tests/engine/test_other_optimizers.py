"""The step of an optimizer of another model says so."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.engine.model import optimizer_hook
from tests.support import multirank, world_mesh


@multirank(2)
@pytest.mark.parametrize("other_is_sharded", [False, True])
def test_the_optimizer_of_another_model_warns(rank: int, world_size: int, other_is_sharded: bool) -> None:
    earlier = set(optimizer_hook.roots)  # of models of other tests, which may have gradients
    mesh = world_mesh(world_size)
    model, other = sw.fully_shard(nn.Linear(4, 2), mesh=mesh), nn.Linear(4, 2)
    if other_is_sharded:
        sw.fully_shard(other, mesh=mesh)
    optimizer = torch.optim.AdamW(other.parameters())
    if other_is_sharded:
        optimizer = sw.fully_shard_optimizer(optimizer)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_hook, "roots", set(optimizer_hook.roots) - earlier)
        with pytest.warns(
            UserWarning, match=r"None of the 2 parameters of this \w*AdamW has a gradient.*'weight'"
        ):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
            torch.optim.AdamW(model.parameters()).step()
            model.zero_grad()
            torch.optim.AdamW(other.parameters()).step()  # no model has a gradient


@multirank(2)
def test_two_models_that_run_do_not_warn(rank: int, world_size: int) -> None:
    """As in a GAN: the optimizer of one model steps before that model has gradients, while the other has some."""
    mesh = world_mesh(world_size)
    model, other = sw.fully_shard(nn.Linear(4, 2), mesh=mesh), sw.fully_shard(nn.Linear(2, 2), mesh=mesh)
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(other.parameters()))
    for p in other.parameters():
        p.requires_grad_(False)
    other(model(torch.ones(2, 4))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad is None for p in other.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
