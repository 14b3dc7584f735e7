"""Sums held between micro-batches, bit by bit: against FSDP2, and against sums that are rounded once each.

A narrow sum takes each gradient in the gradient's own dtype and rounds once, as FSDP2 does. FSDP2 has no
``accumulate_dtype`` and no dtypes of single parameters, so these rows compare with the sum written out.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from tests.support import multirank, world_mesh
from tests.support.matrix import select, together

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LAYOUTS = ("per_parameter", "ragged")


def mesh_of(strategy: str) -> DeviceMesh:
    return world_mesh(2, 2, names=("replicate", "shard")) if strategy == "hsdp" else world_mesh(2)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Row(NamedTuple):
    strategy: str
    layout: str
    storage: torch.dtype
    param: torch.dtype | None
    reduce: torch.dtype | None
    micros: int
    first: str
    """How the earlier micro-batches wait: without communication, or reduced over the shard axis only, or both."""

    def shows(self, strength: int) -> Iterator[Hashable]:
        yield from together(strength, *self)
        yield self.storage, self.param, self.reduce


ROWS = select(
    [
        Row(*row)
        for row in itertools.product(
            ("zero3", "ddp", "hsdp"),
            LAYOUTS,
            (FP32, BF16, FP64),
            (None, BF16, FP16, FP32),
            (None, BF16, FP16, FP32),
            (1, 2, 3, 5),
            ("held", "late", "both"),
        )
        if row[0] == "hsdp" or row[6] == "held"
    ],
    Row.shows,
)


def gradients(engine: Any, plain: nn.Module, row: Row, rank: int, **options: Any) -> list[torch.Tensor]:
    model = copy.deepcopy(plain)
    policy = torchs.MixedPrecisionPolicy(param_dtype=row.param, reduce_dtype=row.reduce)
    for part in (*model, model):
        engine.fully_shard(part, mesh=mesh_of(row.strategy), mp_policy=policy, **options)
    torch.manual_seed(1 + rank)
    for micro in range(row.micros):
        last = micro == row.micros - 1
        held = row.first == "held" or (row.first == "both" and micro % 2 == 0)
        model.set_requires_gradient_sync(last or not held)
        model.set_requires_all_reduce(last)
        model(torch.randn(6, 8, dtype=row.storage)).square().mean().backward()
    return [whole(p.grad) for p in model.parameters()]


@pytest.mark.extensive("a row after another")
@multirank(2, 4)
def test_held_sums_have_the_bits_of_fsdp2(rank: int, world_size: int) -> None:
    """Two ranks to a sum, so that neither its order nor its division rounds differently."""
    for row in ROWS:
        if mesh_of_size(row.strategy) != world_size:
            continue
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6)).to(row.storage)
        expected = gradients(torchs, plain, row, rank)
        actual = gradients(sw, plain, row, rank, strategy=row.strategy, layout=row.layout)
        for e, a in zip(expected, actual, strict=True):
            assert e.dtype == a.dtype and torch.equal(e, a), row


def mesh_of_size(strategy: str) -> int:
    return 4 if strategy == "hsdp" else 2


class Factors(nn.Module):
    """Parameters in two dtypes; each one's gradient is its factor."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(6, 5))
        self.narrow = nn.Parameter(torch.ones(4, 5))

    def forward(self, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((p * factors[name].to(p.dtype)).sum().double() for name, p in self.named_parameters())  # type: ignore[return-value]


@pytest.mark.extensive("each strategy with each layout", but=("zero3-ragged-*", "ddp-per_parameter-*"))
@multirank(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_each_addition_rounds_once(rank: int, world_size: int, strategy: str, layout: str) -> None:
    """Also with dtypes that FSDP2 does not have: of held sums, and of single parameters in one reduction."""
    for reduce, accumulate, micros in itertools.product((BF16, FP16, FP32), (None, BF16, FP32), (2, 3, 6)):
        single = sw.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce)
        policy = sw.PrecisionPolicy(
            reduce_dtype=reduce, accumulate_dtype=accumulate, per_parameter={"narrow": single}
        )
        model: Any = sw.fully_shard(
            Factors(), mesh=world_mesh(2), strategy=strategy, layout=layout, mp_policy=policy
        )
        torch.manual_seed(rank)
        steps = [{name: torch.randn(p.shape) for name, p in model.named_parameters()} for _ in range(micros)]
        for micro, factors in enumerate(steps):
            model.set_requires_gradient_sync(micro == micros - 1)
            model(factors).backward()
        for name, p in model.named_parameters():
            compute, held = (BF16, reduce) if name == "narrow" else (FP32, accumulate or reduce)
            total = steps[0][name].to(compute).to(held)
            for micro, factors in enumerate(steps[1:], 2):
                target = held if micro < micros else reduce
                total = (total.double() + factors[name].to(compute).double()).float().to(target)
            dist.all_reduce(total.div_(2) if reduce is FP16 else total)
            expected = total.float() if reduce is FP16 else (total / 2).float()
            assert torch.equal(whole(p.grad), expected), (name, reduce, accumulate, micros)
