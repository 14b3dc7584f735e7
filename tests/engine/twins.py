"""A sharded model and its plain twin, trained side by side on data that differ by rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import world_mesh

SETTINGS: list[dict[str, Any]] = [
    {},
    {"layout": "ragged"},
    {"layout": sw.Ragged("element"), "strategy": "zero1"},
    {"strategy": "ddp"},
    {"reshard_after_forward": False, "memory": "arena"},
]


class Part(nn.Module):
    """Holds a layer whose weight the outer module reads without calling it, and draws numbers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.lent = nn.Linear(dim, 6), nn.Linear(6, dim)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.linear(
            self.drop(torch.tanh(self.inner(x))), self.lent.weight, self.lent.bias
        )


def models(**options: Any) -> tuple[nn.Module, nn.Module]:
    """A sharded model and the plain one; two units of a list, one whose weights are lent, and a root."""
    torch.manual_seed(3)
    plain = nn.Sequential(Part(5), nn.LayerNorm(5), nn.Linear(5, 5), Part(5), nn.Linear(5, 3))
    plain[4].weight.requires_grad_(False)
    model = copy.deepcopy(plain)
    mesh, inner = world_mesh(dist.get_world_size()), dict(options)
    inner.pop("memory", None)
    sw.fully_shard(model[0].lent, mesh=mesh, **inner)
    sw.fully_shard(model[0], mesh=mesh, **inner)
    sw.fully_shard([model[1], model[2]], mesh=mesh, **inner)
    sw.fully_shard(model[3], mesh=mesh, **inner)
    sw.fully_shard(model, mesh=mesh, **options)
    return model, plain


def data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def reduce_plain(plain: nn.Module) -> None:
    for p in plain.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    reduce_plain(plain)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(full(p.grad), q.grad, msg=name)
        model.get_parameter(name).grad = q.grad = None


def assert_steps_right(model: nn.Module, plain: nn.Module, rank: int, step: int) -> None:
    """A step of training, and no parameter that is not what the plain model's is."""
    for each in (model, plain):
        torch.manual_seed(step)
        each(data(rank, step)).square().mean().backward()
    reduce_plain(plain)
    for each in (model, plain):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
    for (name, value), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(full(value), other, msg=name)
