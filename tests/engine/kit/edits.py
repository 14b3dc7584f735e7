"""A model and its plain copy, which was made before sharding and on which the same is done.

Ranks have different data, edits are the same on all of them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full

REFUSED = "modified by an inplace operation"  # torch's own words


def twins(make: Callable[[], nn.Module], *units: str, poison: bool = True, **options: Any) -> tuple[Any, Any]:
    """A plain model, and a copy of it that is sharded, with the modules of these names as units."""
    os.environ["SHARDWRIGHT_POISON"] = "1" if poison else "0"
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    for name in units:
        sw.fully_shard(model.get_submodule(name), **options)
    return plain, sw.fully_shard(model, **options)


def data(step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step * 100 + dist.get_rank()))


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    return model(data(step)).square().sum()


def average(plain: nn.Module) -> None:
    """The plain model's gradients over all ranks, which must agree on which parameters have one."""
    for p in plain.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def check_same(plain: nn.Module, model: nn.Module, and_gradients: bool = True) -> None:
    """The sums over ranks are taken in another order, hence the tolerance."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.detach()), q.detach(), rtol=1e-5, atol=1e-6, msg=f"value of {name}")
        if and_gradients:
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(
                    full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=f"gradient of {name}"
                )


def step_both(plain: nn.Module, model: nn.Module, step: int = 0, evaluate: bool = False) -> None:
    """A step of SGD, with optimizers made for the parameters of now."""
    for m in (plain, model):
        m.zero_grad()
        loss_of(m, step).backward()
    average(plain)
    check_same(plain, model)
    for m in (plain, model):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    if evaluate:
        with torch.no_grad():
            torch.testing.assert_close(model(data(step)), plain(data(step)), rtol=1e-5, atol=1e-6)
        check_same(plain, model)


def outcome(loss: torch.Tensor) -> str:
    try:
        loss.backward()
    except RuntimeError as error:
        assert REFUSED in str(error)
        return "refused"
    return "done"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
