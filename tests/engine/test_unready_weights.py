"""Backward from tensors that no unit returns is that of the plain model: its unit is gathered for them.

A table of programs: what keeps a tensor that no unit returns, when backward starts from it, whether the units are
frozen, and the memory and strategy of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.support import multirank, world_mesh

kept: list[torch.Tensor] = []


class Keeping(torch.autograd.Function):
    """A product whose backward reads a weight from an attribute, which autograd does not check."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.weight, None


class Block(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.up, self.side = nn.Linear(6, 6), nn.Linear(6, 3)
        self.keeps = keeps
        if keeps == "a hook of an inner module":
            self.side.register_forward_hook(lambda module, args, output: kept.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x)) + x
        side = self.side(y)
        if self.keeps == "a list":
            kept.append(side)
        elif self.keeps == "a list, of an own function":
            kept.append(Keeping.apply(y, self.side.weight.detach()))
        elif self.keeps == "a list, saved by hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                kept.append(self.side(torch.tanh(y)))
        return y


KEEPERS = ("a list", "a hook of an inner module", "a list, of an own function", "a list, saved by hooks")


def together(loss: torch.Tensor, extra: torch.Tensor, x: torch.Tensor, output: torch.Tensor) -> None:
    (loss + extra).backward()


def later(loss: torch.Tensor, extra: torch.Tensor, x: torch.Tensor, output: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    extra.backward()


def before(loss: torch.Tensor, extra: torch.Tensor, x: torch.Tensor, output: torch.Tensor) -> None:
    extra.backward(retain_graph=True)
    loss.backward()


def alone(loss: torch.Tensor, extra: torch.Tensor, x: torch.Tensor, output: torch.Tensor) -> None:
    """Saliency: the gradient of the input alone."""
    (x.grad,) = torch.autograd.grad(extra, x)


def inside(loss: torch.Tensor, extra: torch.Tensor, x: torch.Tensor, output: torch.Tensor) -> None:
    """A hook of an output starts another backward, as a deep-equilibrium layer does."""

    def start(gradient: torch.Tensor) -> None:
        handle.remove()  # the other backward reaches this output, too
        extra.backward(retain_graph=True)

    handle = output.register_hook(start)
    loss.backward()


READS = (together, later, before, alone, inside)
#: Options of the root, and of all units.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero3": ({}, {}),
    "arena": ({"memory": "arena"}, {}),
    "max_pool": ({"memory": "max_pool"}, {}),
    "ragged": ({}, {"layout": "ragged"}),
    "no prefetch": ({"prefetch": 0}, {}),
    "zero2": ({}, {"strategy": "zero2"}),
    "ddp": ({}, {"strategy": "ddp"}),
    "cast": ({}, {"mp_policy": sw.MixedPrecisionPolicy(param_dtype=torch.float64)}),
}


class Net(nn.Module):
    def __init__(self, keeps: str, frozen: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.trunk = nn.Sequential(*(Block(keeps) for _ in range(3))).requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.trunk(self.first(x))
        return self.last(output), output


def build(keeps: str, frozen: bool) -> Net:
    torch.manual_seed(0)
    return Net(keeps, frozen)


#: Strategies of a mesh of two axes.
ON_TWO_AXES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hsdp": ({}, {"strategy": "hsdp"}),
    "hfsdp": ({}, {"strategy": "hfsdp"}),
    "hfsdp, arena": ({"memory": "arena"}, {"strategy": "hfsdp"}),
}


def shard(model: Net, world_size: int, name: str) -> Net:
    of_root, of_all = (MODELS | ON_TWO_AXES)[name]
    mesh = world_mesh(world_size // 2, 2) if name in ON_TWO_AXES else world_mesh(world_size)
    for unit in (model.first, *model.trunk):
        sw.fully_shard(unit, mesh=mesh, **of_all)
    return sw.fully_shard(model, mesh=mesh, **of_root, **of_all)


def step(model: Net, read: Callable[..., None] | None, rank: int, number: int) -> list[torch.Tensor]:
    """The gradients of the input and of the parameters after one step, whole."""
    kept.clear()
    model.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank)).requires_grad_()
    result, output = model(x)
    loss = result.square().mean()
    if read is None:
        loss.backward()
    else:
        read(loss, sum((t.square().mean() for t in kept), torch.zeros(())), x, output)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not isinstance(model, sw.FSDPModule):
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    assert x.grad is not None
    return [x.grad, *(g.detach().clone() for g in whole)]


def differs(found: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(found) != len(right) or not all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, right, strict=True)
    )


def check(name: str, rank: int, world_size: int) -> None:
    for keeps, read, frozen in itertools.product(KEEPERS, READS, (False, True)):
        case = f"{name}: {keeps}, {read.__name__}, {'frozen' if frozen else 'trained'}"
        plain, model = build(keeps, frozen), shard(build(keeps, frozen), world_size, name)
        for number, each in enumerate((None, read, None)):
            found, right = step(model, each, rank, number), step(plain, each, rank, number)
            assert not differs(found, right), f"{case}: step {number}"


@multirank(2)
@pytest.mark.extensive("each memory and strategy", but=("zero3-*",))
@pytest.mark.parametrize("name", MODELS)
def test_tensors_that_no_unit_returns_are_right(rank: int, world_size: int, name: str) -> None:
    check(name, rank, world_size)


@multirank(4)
@pytest.mark.extensive("the same on two axes")
@pytest.mark.parametrize("name", ON_TWO_AXES)
def test_on_two_axes_too(rank: int, world_size: int, name: str) -> None:
    check(name, rank, world_size)
