"""Casts of one rank alone, with every codec of gathers and every hook of gradients: nothing travels, so nothing rounds.

A lone rank casts its shards straight into the full weights and copies the rest with wide elements. So sizes are odd,
and dtypes of one, two, four and eight bytes are mixed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.comm_hooks import MXFP8, BlockwiseFP8, Cast, Compressed, Int8Blocks, PowerSGD
from tests.engine.kit.models import full
from tests.support import multirank
from tests.support.matrix import generate

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CODECS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "bf16": lambda: Cast(BF16),
    "int8": lambda: Int8Blocks(8),
    "mx": lambda: MXFP8(),
    "tiles": lambda: BlockwiseFP8(16),
}
HOOKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "bf16": lambda: Compressed(Cast(BF16)),
    "fp16": lambda: Compressed(Cast(FP16)),
    "int8": lambda: Compressed(Int8Blocks(8)),
    "int8, errors kept": lambda: Compressed(Int8Blocks(8), error_feedback=True),
    "whole rank": lambda: PowerSGD(64),
    "rank 1": lambda: PowerSGD(1),
}
AXES: dict[str, list[Any]] = {
    "codec": [*CODECS],
    "hook": [*HOOKS],
    "dtypes": [
        (FP32, None, None),
        (FP32, BF16, FP32),
        (FP32, FP16, BF16),
        (BF16, FP32, None),
        (FP64, BF16, FP32),
    ],
    "layout": ["per_parameter", "ragged", sw.Ragged("element"), sw.Ragged(16)],
    "memory": ["dynamic", "arena", "max_pool"],
    "accumulation": ["none", "held", "added"],
}


class Odd(nn.Module):
    """Sizes that are no multiples of anything, and counts of whole numbers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.Linear(3, 1)
        self.counts = nn.Parameter(torch.arange(5, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.two(torch.tanh(self.one(x) + self.counts.to(x.dtype).sum() / 16))
        return self.three(hidden) * self.scale


def trained(model: Any, steps: int, computes_in: torch.dtype | None, accumulation: str) -> list[torch.Tensor]:
    """Losses and gradients of all micro-batches."""
    found = []
    for step in range(steps):
        for micro in range(1 if accumulation == "none" else 3):
            if accumulation == "held" and isinstance(model, sw.FSDPModule):
                model.set_requires_gradient_sync(micro == 2)
            generator = torch.Generator().manual_seed(100 * step + micro)
            x = torch.randn(4, 5, generator=generator).to(computes_in or model.scale.dtype)
            loss = model(x).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [full(p.grad).clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
    return found


@multirank(1)
@pytest.mark.parametrize(
    "row", generate(AXES, lambda *_: False, 2), ids=lambda row: "-".join(map(str, row.values()))
)
def test_nothing_that_stays_is_rounded(rank: int, world_size: int, row: dict[str, Any]) -> None:
    storage, compute, reduce = row["dtypes"]
    torch.manual_seed(0)
    plain = Odd().to(storage)
    options = {
        "layout": row["layout"],
        "mp_policy": sw.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce),
    }
    models = []
    for way in ("none", row["codec"]):
        model = copy.deepcopy(plain)
        sw.fully_shard(model.one, **options)
        sw.fully_shard(model, memory=row["memory"], **options)
        if way != "none":
            model.set_all_gather_codec(CODECS[way]())
        if len(models) and row["hook"] != "none":
            model.set_gradient_comm_hook(HOOKS[row["hook"]]())
        model.unshard()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            dtype = (compute or storage) if q.is_floating_point() else q.dtype
            if name.startswith("one."):
                continue
            assert torch.equal(p.detach(), q.detach().to(dtype)), name
        model.reshard()
        models.append(model)
    expected = trained(models[0], 3, compute, row["accumulation"])
    found = trained(models[1], 3, compute, row["accumulation"])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    narrow = {BF16, FP16} & {storage, compute, reduce}
    for ours, theirs in zip(expected, trained(plain, 3, None, row["accumulation"]), strict=True):
        torch.testing.assert_close(
            ours.double(), theirs.double(), rtol=5e-2 if narrow else 1e-5, atol=2e-2 if narrow else 1e-6
        )
