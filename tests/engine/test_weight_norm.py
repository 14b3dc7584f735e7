"""Weight norm beside sharding: it trains, and can be taken off a sharded model, in every layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank


def build() -> Any:
    """Copies of one would share the classes that torch makes, from which the weights are taken off."""
    torch.manual_seed(0)
    return nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Sequential(weight_norm(nn.Linear(6, 3), dim=1)))


def train(model: Any, ranks: range, step: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for r in ranks:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + r))
        (model(x).square().sum() / len(ranks)).backward()
    optimizer.step()
    optimizer.zero_grad()


@multirank(2)
def test_weight_norm_is_taken_off_a_sharded_model(rank: int, world_size: int) -> None:
    for layout in ("per_parameter", "ragged", sw.Ragged("element")):
        plain, model = build(), build()
        sw.fully_shard(model[1], layout=layout)
        sw.fully_shard(model, layout=layout)
        for step in range(3):
            if step == 1:
                for each in (plain[0], plain[1][0], model[0], model[1][0]):
                    remove_parametrizations(each, "weight")
            train(plain, range(world_size), step)
            train(model, range(rank, rank + 1), step)
            expected = dict(plain.named_parameters())
            assert list(expected) == [name for name, _ in model.named_parameters()]
            for name, p in model.named_parameters():
                torch.testing.assert_close(full(p.detach()), expected[name].detach(), msg=f"{layout} {name}")
