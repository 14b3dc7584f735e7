"""Models whose units all have another size, and what both libraries are asked for on them.

A collective's size tells which unit it serves. What holds for torch's ``fully_shard`` is the specification:
``SHARDWRIGHT_MATRIX=all`` runs most tests with it as well, which proves them. Tests of ours alone say where plain
PyTorch, not FSDP2, is what we follow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.kit.subclasses import LIBRARIES, data, loss_of
from tests.support import world_mesh
from tests.support.matrix import everything

both = pytest.mark.parametrize("library", sorted(LIBRARIES) if everything() else ["shardwright"])
ours = pytest.mark.parametrize("library", ["shardwright"])
Policy = torch_fsdp.MixedPrecisionPolicy


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks of 8, 16 and 24 hidden units, and a head of 3 rows, which are uneven over 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8 * i) for i in (1, 2, 3))
        self.head = nn.Linear(6, 3)
        self.unused: nn.Linear | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def shard(library: str, model: nn.Module, **options: Any) -> Any:
    """Each block a unit, and the rest."""
    fully_shard, mesh = LIBRARIES[library].fully_shard, world_mesh(dist.get_world_size())
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def averaged(
    model: nn.Module,
    world_size: int,
    micros: int = 1,
    loss: Callable[[nn.Module, int, int], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The plain model's gradients, averaged over ranks and summed over micro-batches; without those it lacks."""
    loss = loss or (lambda m, rank, micro: loss_of(m(data(rank, micro))))
    model = copy.deepcopy(model)
    with torch.enable_grad():
        for micro in range(micros):
            for rank in range(world_size):
                (loss(model, rank, micro) / world_size).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


class Collectives(TorchDispatchMode):
    """Every collective in order: ("gather" or "reduce", bytes that it moves out of this rank)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket._qualified_op_name
        if name.startswith("c10d::") and "barrier" not in name:
            tensors: list[torch.Tensor] = []
            torch.utils._pytree.tree_map_only(torch.Tensor, tensors.append, args)
            kind = "gather" if "allgather" in name else "reduce"
            self.seen.append((kind, max(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))

    def take(self) -> list[tuple[str, int]]:
        seen, self.seen = self.seen, []
        return seen

    def count(self, kind: str) -> int:
        return sum(k == kind for k, _ in self.take())


def need(library: str, *methods: str) -> None:
    """Skip where this torch's FSDP2 lacks a method; ours has them with every torch."""
    missing = [m for m in methods if not hasattr(LIBRARIES[library].FSDPModule, m)]
    if missing and library == "torch":
        pytest.skip(f"FSDP2 of torch {torch.__version__} has no {', '.join(missing)}")


class Boom(Exception):
    pass


def fail(*_: Any) -> None:
    raise Boom
