"""Small models and a plain-PyTorch reference for the engine's tests. Sizes are uneven on purpose."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.engine import UNIT


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Token embedding, blocks, head. No size but ``hidden`` divides evenly over 2, 3 and 4 ranks."""

    def __init__(self, layers: int = 2, dim: int = 7, hidden: int = 12, vocab: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def build(seed: int = 0, **sizes: int) -> Model:
    torch.manual_seed(seed)
    return Model(**sizes)


def shard(model: Model, head_unit: bool = False, **options: object) -> Model:
    for block in model.blocks:
        sw.fully_shard(block, **options)
    if head_unit:
        sw.fully_shard([model.norm, model.head], **options)
    return sw.fully_shard(model, **options)


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def shard_layers(plain: nn.Sequential, **options: Any) -> Any:
    """A sharded copy of the three layers: two units and the root, which has the last layer."""
    model = copy.deepcopy(plain)
    for i in (0, 2):
        sw.fully_shard(model[i], **options)
    return sw.fully_shard(model, **options)


def tokens(step: int, micro: int, rank: int, vocab: int = 11) -> torch.Tensor:
    """Different data for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(step * 10_007 + micro * 101 + rank)
    return torch.randint(0, vocab, (2, 5), generator=generator)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


class Reference:
    """The unsharded model on every rank's data: one copy per compute dtype, gradients averaged in the reduce dtype."""

    def __init__(self, model: nn.Module, compute: torch.dtype, reduce: torch.dtype) -> None:
        self.model = copy.deepcopy(model)
        self.compute, self.reduce = compute, reduce

    def backward(self, world_size: int, batches: list[list[torch.Tensor]]) -> list[float]:
        """``batches[micro][rank]``; leaves averaged gradients in ``self.model``; returns rank 0's losses."""
        losses = []
        work = copy.deepcopy(self.model).to(self.compute)
        for micro in batches:
            totals: list[torch.Tensor | None] = [None] * len(list(self.model.parameters()))
            for rank, batch in enumerate(micro):
                for p in work.parameters():
                    p.grad = None
                loss = loss_of(work(batch), batch)
                loss.backward()
                if rank == 0:
                    losses.append(loss.item())
                for i, p in enumerate(work.parameters()):
                    if p.grad is not None:
                        g = p.grad.to(self.reduce).float()
                        totals[i] = g if totals[i] is None else totals[i] + g
            for p, total in zip(self.model.parameters(), totals, strict=True):
                if total is not None:
                    g = (total / world_size).to(self.reduce).to(p.dtype)
                    p.grad = g if p.grad is None else p.grad + g
        return losses


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def units_of(model: nn.Module) -> list[Any]:
    """The units of a sharded model, in the order of its modules."""
    return list(dict.fromkeys(u for m in model.modules() if (u := getattr(m, UNIT, None)) is not None))
