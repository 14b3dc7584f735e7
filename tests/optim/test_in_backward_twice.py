"""Optimizers in backward: a unit of which two calls come one after the other in one backward is stepped once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import shardwright as sw
from tests.support import multirank

SETTINGS: list[dict[str, Any]] = [
    {},
    {"strategy": "ddp", "layout": "ragged"},
    {"offload_policy": sw.CPUOffloadPolicy(pin_memory=False)},
]


class Twin(nn.Module):
    """Its inner unit is the last to reduce in the backward of one call and the first in the backward of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.block(self.first(x))))  # type: ignore[no-any-return]


@multirank(2)
def test_two_calls_one_after_the_other_in_one_backward(rank: int, world_size: int) -> None:
    for options in SETTINGS:
        torch.manual_seed(0)
        plain = Twin()
        weights = []
        for wrap in (sw.fully_shard_optimizer, sw.optim.in_backward):
            model: Any = copy.deepcopy(plain)
            sw.fully_shard(model.block, **options)
            sw.fully_shard(model, **options)
            optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
            for step in range(2):
                generator = torch.Generator().manual_seed(10 * step + rank)
                one, other = torch.randn(2, 3, 4, generator=generator)
                model.set_is_last_backward(False)
                model(one).square().mean().backward()
                model.set_is_last_backward(True)
                (model(one).square().mean() + model(other).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append([p.detach().full_tensor() for p in model.parameters()])
        for expected, actual in zip(*weights, strict=True):
            assert torch.equal(actual, expected), options


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.beside = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = self.used(x)
        return self.beside(y) if both else y  # type: ignore[no-any-return]


@multirank(2)
def test_a_penalty_alone_steps_a_unit(rank: int, world_size: int) -> None:
    """Every backward is a step, also of a unit that forward did not use but a penalty did."""
    for options in SETTINGS:
        torch.manual_seed(0)
        plain = Pair()
        model: Any = copy.deepcopy(plain)
        for each in (model.used, model.beside):
            sw.fully_shard(each, **options)
        sw.fully_shard(model, **options)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        inside = sw.optim.in_backward(torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            for net in (plain, model):
                loss = net(x, step % 2 == 1).square().mean()
                (loss + sum(p.square().sum() for p in net.beside.parameters())).backward()
            optimizer.step()
            optimizer.zero_grad()
            inside.zero_grad()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                off = float((mine.detach().full_tensor() - theirs).abs().max())
                assert off < 1e-5, (options, step, off)
