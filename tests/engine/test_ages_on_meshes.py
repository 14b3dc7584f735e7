"""A rank that skips an optimizer step, on meshes of two axes: every rank hears of it, in whatever group it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.support import multirank, world_mesh

#: A strategy, and the ranks that skip a step.
CASES: list[tuple[str, tuple[int, ...]]] = [
    ("hsdp", (1,)),
    ("hsdp", (0, 3)),
    ("hfsdp", (1,)),
    ("zero1", (2,)),
    ("ddp", (1,)),
]


@multirank(4)
def test_every_rank_of_the_mesh_raises(rank: int, world_size: int) -> None:
    mesh = world_mesh(2, 2)
    for strategy, skipping in CASES:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        sw.fully_shard(model[0], mesh=mesh, strategy=strategy)
        sw.fully_shard(model, mesh=mesh, strategy=strategy)
        optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def backward(model: Any = model) -> None:
            x = torch.randn(2, 5, generator=torch.Generator().manual_seed(rank))
            model(x).square().mean().backward()

        for step in range(2):
            backward()
            if step == 0 or rank not in skipping:
                optimizer.step()
            optimizer.zero_grad()
        for _ in range(2):  # the collectives stay in order, and the error comes again
            with pytest.raises(RuntimeError, match=r"after [12] optimizer steps?.*older weights than others"):
                backward()
        model.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
        for _ in range(2):
            backward()
            optimizer.step()
            optimizer.zero_grad()
