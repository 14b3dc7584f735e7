"""Weights of a unit that stay gathered after its forward, used there with a rank's own tensors: as in FSDP2.

For example a loss in chunks that reads the output layer's weight after the root's forward.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, seed_all

pytestmark = pytest.mark.skipif(not subclasses_dispatch, reason="torch's own DTensor computes there")


class Net(nn.Module):
    """The output layer and a table belong to the root, which does not use them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mid = nn.Linear(6, 8), nn.Linear(8, 8)
        self.lm_head, self.table = nn.Linear(8, 11), nn.Embedding(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mid(torch.tanh(self.body(x)))


def shard(plain: nn.Module, **options: Any) -> Any:
    model: Any = copy.deepcopy(plain)
    sw.fully_shard(model.body, **options)
    return sw.fully_shard(model, **options)


def in_chunks(model: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = [
        F.cross_entropy(rows @ model.lm_head.weight.t() + model.lm_head.bias, targets, reduction="sum")
        for rows, targets in zip(h.chunk(3), y.chunk(3), strict=True)
    ]
    return torch.stack(losses).sum() / len(h)


LOSSES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda m, h, y: F.cross_entropy(F.linear(h, m.lm_head.weight, m.lm_head.bias), y),
    "module": lambda m, h, y: F.cross_entropy(m.lm_head(h), y),
    "chunks": in_chunks,
    "table": lambda m, h, y: (m.table(y % 5) * h).sum(1).mean(),
    "rows": lambda m, h, y: (h * m.lm_head.bias[:8].sum() * m.mid.weight[0]).mean(),
    "and a penalty": lambda m, h, y: (
        in_chunks(m, h, y)
        + 0.1 * (m.lm_head.weight**2).sum()
        + (m.table(y % 5) * h).mean()
        + m.table.weight.norm()
    ),
}


def data(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(6 + rank, 6, generator=generator).to(dtype)
    return x, torch.randint(11, (6 + rank,), generator=generator)


def loss_of(model: Any, name: str, rank: int, dtype: torch.dtype) -> torch.Tensor:
    x, y = data(rank, dtype)
    return LOSSES[name](model, model(x), y)


@pytest.mark.extensive("each strategy", but=("zero3-*",))
@multirank(2, 3)
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
def test_losses_after_the_roots_forward(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    for name, micros in itertools.product(LOSSES, (1, 2)):
        model, twin = shard(plain, strategy=strategy), copy.deepcopy(plain)
        for micro in range(micros):
            model.set_requires_gradient_sync(micro == micros - 1)
            for r in range(world_size):
                (loss_of(twin, name, r, torch.float64) / world_size).backward()
            loss_of(model, name, rank, torch.float64).backward()
        for (label, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{strategy}, {name}: {label}"
            if q.grad is not None:
                torch.testing.assert_close(full(p.grad), q.grad, msg=f"{strategy}, {name}, {micros}: {label}")


@multirank(2)
def test_in_the_compute_dtype(rank: int, world_size: int) -> None:
    """As FSDP2 computes: with weights in the parameters' compute dtype."""
    torch.manual_seed(0)
    plain = Net()
    policy = sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for name in ("linear", "chunks", "table"):
        model = shard(plain, mp_policy=policy)
        seed_all(rank)
        loss = loss_of(model, name, rank, torch.float32)
        loss.backward()
        twin = copy.deepcopy(plain).bfloat16()
        expected = loss_of(twin, name, rank, torch.bfloat16)
        assert loss.dtype == expected.dtype, name
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=2e-2, atol=2e-2, msg=name)


@multirank(2)
def test_weights_that_are_not_gathered_are_gathered(rank: int, world_size: int) -> None:
    plain = Net()
    model = shard(plain)
    x, y = data(rank, torch.float32)
    ones = torch.ones(2, 8)
    torch.testing.assert_close(model.lm_head(ones), plain.lm_head(ones))
    h = model(x)
    torch.testing.assert_close(F.linear(x, model.body.weight), F.linear(x, plain.body.weight))
    LOSSES["linear"](model, h, y).backward()
    torch.testing.assert_close(model.lm_head(ones), plain.lm_head(ones))
