"""A sharded model refuses, with names, double backward, opaque outputs, pickling and old weights."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch

import shardwright as sw
from tests.engine.cases.base import DIM, loss_of
from tests.engine.cases.running import sharded_net, step_of
from tests.support import multirank


@multirank(2, timeout=15.0)
@pytest.mark.parametrize("way", ["backward", "grad"])
def test_double_backward_is_refused_by_name(rank: int, world_size: int, way: str) -> None:
    model = sharded_net()
    x = torch.randn(3, DIM).requires_grad_()
    loss = loss_of(model(x))
    with pytest.raises(RuntimeError, match=r"create_graph=True reached unit 'Net'"):
        if way == "backward":
            loss.backward(create_graph=True)
        else:
            torch.autograd.grad(loss, x, create_graph=True)
    model.zero_grad()
    step_of(model, rank)


@multirank(2, timeout=15.0)
def test_pickling_is_refused_by_name(rank: int, world_size: int) -> None:
    model = sharded_net()
    for write in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        for part in (model, model.blocks[0]):
            with pytest.raises(TypeError, match=r"sharded .* cannot be pickled.*state_dict"):
                write(part)


@multirank(2, timeout=15.0)
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_backward_after_the_optimizer_is_refused_as_by_torch(
    rank: int, world_size: int, wrapped: bool, reshard: bool | None
) -> None:
    model = sharded_net(reshard_after_forward=reshard)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = sw.fully_shard_optimizer(optimizer) if wrapped else optimizer
    step_of(model, rank)
    loss = loss_of(model(torch.randn(3, DIM)))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    step_of(model, rank)
