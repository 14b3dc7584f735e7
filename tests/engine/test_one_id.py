"""Modules called outside the forward of their unit with one element, which torch takes for the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwright as sw
from tests.support import multirank


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.narrow = nn.Embedding(10, 4), nn.Linear(1, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)  # type: ignore[no-any-return]


@multirank(2)
def test_one_element_of_each_ranks_own(rank: int, world_size: int) -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda model: model.embed(torch.tensor([9 * rank])),
        lambda model: model.embed(torch.tensor(9 * rank)),
        lambda model: model.embed(torch.tensor([[9 * rank, 1]])),
        lambda model: model.narrow(torch.full((1, 1), rank + 1.0)),
    ]
    for layout in ("per_parameter", "ragged"):
        torch.manual_seed(0)
        plain = Lookup()
        expected = [call(plain).detach() for call in calls]
        rows = plain.embed.weight.detach().clone()
        model: Any = sw.fully_shard(plain, layout=layout)
        for call, right in zip(calls, expected, strict=True):
            assert torch.equal(call(model), right)
        assert torch.equal(model(torch.tensor([9 * rank])), rows[[9 * rank]])
        scaled = model.embed.weight.detach() * torch.tensor(2.0)  # a number is the same on every rank
        assert torch.equal(scaled.full_tensor(), 2 * rows)
