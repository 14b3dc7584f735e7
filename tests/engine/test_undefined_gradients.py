"""Gradients that autograd does not define, such as those of a norm of order 0: nothing fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.support import multirank, seed_all

WAYS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "ragged": {"layout": "ragged"},
    "zero1": {"strategy": "zero1"},
    "ddp": {"strategy": "ddp"},
}


class Counting(nn.Module):
    """Adds to its loss how many elements are not 0, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.linalg.vector_norm(self.layer.weight, 0) + torch.linalg.vector_norm(self.scalar, 0)
        return self.layer(x).square().mean() + count


@multirank(2)
@pytest.mark.parametrize("where", ["forward", "outside"])
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_not_defined(rank: int, world_size: int, way: str, where: str) -> None:
    plain = Counting()
    model = copy.deepcopy(plain)
    sw.fully_shard(model, **WAYS[way])
    seed_all(rank)
    inputs = [torch.randn(3, 4) for _ in range(2)]

    def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(x)
        if where == "outside":
            loss = loss + torch.linalg.vector_norm(module.scalar, 0, -1)  # type: ignore[arg-type]
        return loss

    everyones: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    torch.distributed.all_gather_object(everyones, inputs)
    for number, x in enumerate(inputs):
        sum(loss_of(plain, each[number]) / world_size for each in everyones).backward()  # type: ignore[union-attr]
        with sw.hash_gradients(model):
            loss_of(model, x).backward()
    for (name, expected), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)  # type: ignore[union-attr]
