"""Shards along another dimension than the first are contiguous, as are gradients and optimizer state, and train alike.

Compared with a plain model on all ranks' data: values, gradients accumulated over micro-batches, state dicts.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import shardwright as sw
from tests.engine.kit.models import Block, Reference, full
from tests.support import multirank, world_mesh

Tensor = torch.Tensor
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """Sizes divide evenly and unevenly; one weight has its third size in the middle dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Block(6, 9)
        self.second = Block(6, 4)
        self.mix = nn.Conv1d(6, 6, 3, padding=1)
        self.out = nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.one_hot(tokens % 6, 6).to(self.out.weight.dtype)
        return self.out(self.mix(self.second(self.first(x)).mT).mT)


def tokens(step: int, micro: int, rank: int) -> Tensor:
    return torch.randint(
        0, 5, (2, 4), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    )


def by_dimension(p: nn.Parameter) -> Shard:
    return Shard(p.ndim - 1)


def sharded(plain: nn.Module, **options: Any) -> nn.Module:
    model = copy.deepcopy(plain)
    sw.fully_shard(model.first, shard_placement_fn=by_dimension, **options)
    sw.fully_shard(model.second, shard_placement_fn=by_dimension, **options)
    return sw.fully_shard(model, shard_placement_fn=by_dimension, **options)


def check_contiguous(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, p in model.named_parameters():
        state = [v for v in optimizer.state[p].values() if v.dim()]
        assert p.grad is not None and len(state) == 2, name
        for t in (p, p.grad, p.data, p.detach(), *state):
            t.to_local().view(-1)
            assert t.to_local().is_contiguous(), name


def train(plain: nn.Module, model: nn.Module, rank: int, ranks: int, precise: bool = True) -> None:
    """A step with two micro-batches and one with clipping, and an edit between them."""
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (plain, model)]
    optimizers[1] = sw.fully_shard_optimizer(optimizers[1])
    reference = Reference(plain, torch.float32 if precise else torch.bfloat16, torch.float32)
    reference.model = plain
    near = {"rtol": 1e-4, "atol": 1e-5} if precise else {"rtol": 0.1, "atol": 0.03}  # bf16 has 8 bits
    for step in range(3):
        micros = 2 if step == 0 else 1
        reference.backward(ranks, [[tokens(step, m, r) for r in range(ranks)] for m in range(micros)])
        for micro in range(micros):
            batch = tokens(step, micro, rank)
            nn.functional.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten()).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, **near, msg=lambda m, n=name: f"{n}: {m}")
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            if step == 1:
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
        check_contiguous(model, optimizers[1])
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.no_grad():
                m.out.weight.data.mul_(0.9)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(full(value), plain.state_dict()[key], **near)


@pytest.mark.extensive("each dimension")
@multirank(2, 3)
def test_shards_of_other_dimensions_are_contiguous(rank: int, world_size: int) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"strategy": "zero1"},
        {"strategy": "zero2"},
        {"reshard_after_forward": False},
        {"offload_policy": sw.CPUOffloadPolicy()},
        {"mp_policy": BF16},
    ]
    for options in settings[: None if world_size == 2 else 1]:
        plain = Net()
        model = sharded(plain, **options)
        train(plain, model, rank, world_size, "mp_policy" not in options)


@pytest.mark.extensive("each dimension on a mesh")
@multirank(4)
def test_shards_of_other_dimensions_beside_replicas(rank: int, world_size: int) -> None:
    plain = Net()
    mesh = world_mesh(2, 2, names=("replicate", "shard"))
    train(plain, sharded(plain, mesh=mesh), rank, world_size)
    plain = Net()
    train(plain, sharded(plain, reshard_after_forward=2), rank, world_size)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_addresses_are_those_of_local_tensors(rank: int, world_size: int, layout: str) -> None:
    model = sw.fully_shard(nn.Linear(6, 6), layout=layout)
    model(torch.ones(1, 6)).sum().backward()
    for p in model.parameters():
        for t in (p, p.data, p.detach(), p.grad):
            assert t.data_ptr() == t.to_local().data_ptr() != 0
    assert len({p.data_ptr() for p in model.parameters()}) == 2


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(32.0).view(8, 4))

    def forward(self, x: Tensor, way: str = "") -> Tensor:
        full = self.weight
        if way:
            full = getattr(full, way)(-1) if way in ("view", "reshape") else full.contiguous().view(-1)
        return x @ full.view(8, 4) if way else x @ full


@multirank(2)
def test_full_weights_of_another_dimension_are_strided(rank: int, world_size: int) -> None:
    """As docs/layouts.md says: ``view`` raises an error, ``reshape`` and ``contiguous`` are the ways out."""
    x = torch.full((2, 8), rank + 1.0)
    model: Any = sw.fully_shard(Flat(), shard_placement_fn=lambda p: Shard(1))
    model.unshard()
    assert model.weight.shape == (8, 4) and model.weight.stride() == (1, 8)
    with pytest.raises(RuntimeError, match=r"Use \.reshape"):
        model(x, "view")
    for way in ("", "reshape", "contiguous"):
        out = model(x, way)
        torch.testing.assert_close(out, x @ torch.arange(32.0).view(8, 4))
        out.sum().backward()
        torch.testing.assert_close(full(model.weight.grad), torch.full((8, 4), 3.0))  # 2 rows, 1.5 on average
        model.zero_grad()
    along_first: Any = sw.fully_shard(Flat())
    along_first.unshard()
    assert along_first.weight.is_contiguous()
