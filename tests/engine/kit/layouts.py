"""A model with parameters of many shapes under every layout, beside the plain one: trained and compared."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.engine.extend.named_strategies import resolve
from tests.engine.kit.models import loss_of, tokens
from tests.engine.kit.places import On
from tests.engine.programs import whole

LAYOUTS: dict[str, str | sw.Ragged] = {
    "row": sw.Ragged("row"),
    "blocks": sw.Ragged(2),
    "element": sw.Ragged("element"),
    "per_parameter": "per_parameter",
}
#: Where steps follow each other and rounding adds up; what is wrong is wrong by more.
LOOSE = 1e-4


def at(name: str, *shape: int) -> On:
    return On(resolve(name, len(shape)).stages, shape)


class Block(nn.Module):
    """Sizes that no number of ranks divides, of 0 to 3 dimensions, two of 0; one unused, one frozen."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 13)
        self.down = nn.Linear(13, dim, bias=False)
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.2))
        self.mix = nn.Parameter(torch.randn(3, 2, dim) / 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.randn(5, dim) / 4, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.down(torch.tanh(self.up(self.norm(x)) + self.shift))
        return x + (x @ self.frozen.t())[..., :1] + (x @ self.mix.flatten(0, 1).t()).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, dim: int = 7, vocab: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def shard(model: Model, on: On, layout: str, **options: Any) -> Any:
    """The blocks and the rest: three units. Full parameters that were released hold garbage."""
    os.environ["SHARDWRIGHT_POISON"] = "1"
    options = {"mesh": on.mesh, "strategy": on.strategy, "layout": LAYOUTS[layout], **options}
    for block in model.blocks:
        sw.fully_shard(block, **options)
    return sw.fully_shard(model, **options)


def backward(model: Any, rank: int, step: int = 0, micro: int = 0) -> torch.Tensor:
    batch = tokens(step, micro, rank)
    loss = loss_of(model(batch), batch)
    loss.backward()
    return loss.detach()


def backward_plain(plain: nn.Module, world_size: int, step: int = 0, micro: int = 0) -> None:
    """The mean over all ranks' data."""
    for rank in range(world_size):
        batch = tokens(step, micro, rank)
        (loss_of(plain(batch), batch) / world_size).backward()


def check(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = LOOSE) -> None:
    """Relative to the largest element."""
    assert found.shape == expected.shape, name
    error = (found - expected.detach()).abs().max().item() / max(expected.abs().max().item(), 1e-2)
    assert error <= tolerance, f"{name} is off by {error:.2e} of its largest element"


def check_parameters(model: nn.Module, plain: nn.Module, tolerance: float = LOOSE) -> None:
    """Every rank must call it. `whole` finds replicas that drift and what is missing or there twice."""
    values, _, _ = whole(model)
    for (name, p), q, value in zip(model.named_parameters(), plain.parameters(), values, strict=True):
        assert p.shape == q.shape and p.dtype == q.dtype, name
        check(name, value, q, tolerance)


def check_gradients(model: nn.Module, plain: nn.Module, tolerance: float = LOOSE) -> None:
    _, gradients, _ = whole(model)
    for (name, p), q, gradient in zip(model.named_parameters(), plain.parameters(), gradients, strict=True):
        assert (p.grad is None) == (q.grad is None), f"{name}.grad is {p.grad}, expected {q.grad}"
        if q.grad is not None:
            assert p.grad.device_mesh == p.device_mesh and p.grad.to_local().shape == p.to_local().shape, name
            assert p.grad.shape == q.grad.shape and p.grad.dtype == q.grad.dtype, name
            check(f"gradient of {name}", gradient, q.grad, tolerance)


@torch.no_grad()
def synchronise(model: nn.Module, plain: nn.Module) -> None:
    """Copy the parameters, compared just now, into ``plain``: rounding does not add up, nor flip that of a copy."""
    for q, value in zip(plain.parameters(), whole(model)[0], strict=True):
        q.copy_(value)


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    """Its division by the root of the second moment must not blow up what cancelled to almost nothing."""
    return torch.optim.AdamW(parameters, **{"lr": 0.03, "eps": 1e-3, **options})


def check_outputs(model: Any, plain: nn.Module, rank: int) -> None:
    batch = tokens(9, 9, rank)
    with torch.no_grad():
        torch.testing.assert_close(model(batch), plain(batch), rtol=1e-4, atol=1e-5)
