"""For the tests of whole-tensor optimizers: a model of odd shapes, and equal gradients for it and its plain twin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import shardwright as sw
from shardwright.engine import RaggedTensor
from tests.support import world_mesh

LAYOUTS: dict[str, Any] = {
    "per_parameter": "per_parameter",
    "row": sw.Ragged("row"),
    "rows3": sw.Ragged(3),
    "element": sw.Ragged("element"),
}

#: Name -> the mesh's shape for a world size, and the strategy.
STRATEGIES: dict[str, tuple[Callable[[int], tuple[int, ...]], str]] = {
    "zero3": (lambda n: (n,), "zero3"),
    "zero1": (lambda n: (n,), "zero1"),
    "ddp": (lambda n: (n,), "ddp"),
    "hsdp": (lambda n: (2, n // 2), "hsdp"),
    "hfsdp": (lambda n: (2, n // 2), "hfsdp"),
}


class Odd(nn.Module):
    """Matrices wide, tall, of one row and of more rows than ranks; with ``others``, of 0, 1 and 3 dimensions, too."""

    def __init__(self, others: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        shapes: dict[str, tuple[int, ...]] = {"wide": (3, 8), "tall": (9, 2), "row": (1, 6), "even": (8, 4)}
        if others:
            shapes |= {"vector": (7,), "cube": (3, 2, 5), "scalar": (), "embed": (5, 5)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape).to(dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(p.sum() for p in self.parameters()) * x


class Whole(torch.optim.Optimizer):
    """Divides by the norm of the whole gradient, keeps state of every kind, counts its steps, fails when told to."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        self.steps, self.log, self.fails_on = 0, [], None

    def shard_needs(self, p: torch.Tensor) -> Any:
        return "tensor"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["count"] += 1
            group["late"] = group.get("late", 0) + 1  # not there before the first step
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.log.append(p.shape)
                if p.shape == self.fails_on:
                    raise KeyError("asked to fail")
                state = self.state[p]
                if not state:
                    sums = torch.zeros(p.numel() + 1)
                    state |= {
                        "calls": 0,
                        "kind": "whole",
                        "step": torch.zeros(()),
                        "nested": {"sums": [sums]},
                    }
                state["calls"] += 1
                state["step"] += 1
                state["nested"]["old"] = state["calls"] % 2 == 0
                state["nested"]["sums"][0] = state["nested"]["sums"][0] + p.grad.sum()
                times = group["count"] + group["late"] + self.steps + state["calls"]
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"] * times)


def twins(
    world_size: int, strategy: str = "zero3", layout: str = "per_parameter", **options: Any
) -> tuple[Odd, Odd]:
    """The plain model and the sharded one."""
    plain = Odd(**options)
    shape, name = STRATEGIES[strategy]
    mesh = world_mesh(*shape(world_size))
    return plain, sw.fully_shard(copy.deepcopy(plain), mesh=mesh, strategy=name, layout=LAYOUTS[layout])


def like(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` sharded as ``p`` is, without communication."""
    if isinstance(p, RaggedTensor):
        return RaggedTensor.from_full(value, p.spec)
    if isinstance(p, DTensor):
        mesh = p.device_mesh
        whole = DTensor.from_local(value.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(placements=p.placements)
    return value.clone()


def set_gradients(*models: nn.Module, step: int, without: str = "") -> None:
    for model in models:
        generator = torch.Generator().manual_seed(step)
        for name, p in model.named_parameters():
            value = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if name == without else like(p, value)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_equal_bits(plain: nn.Module, sharded: nn.Module, where: str = "") -> None:
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(full(q), p), (name, where)


def state_leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, dict):
        for value in values.values():
            yield from state_leaves(value)
    else:
        yield values
