"""AdamW8bit with small blocks, gradients of many magnitudes, and steps that are the same however tensors are cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwright as sw
from shardwright.engine import RaggedTensor
from tests.engine.kit.models import full

BLOCK = 8
CODED = ["exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"]


def tiny(params: Any, **options: Any) -> sw.AdamW8bit:
    """With blocks so small that small tensors have codes."""
    return sw.AdamW8bit(params, **{"lr": 0.01, "block_size": BLOCK, "min_size": 16, **options})


def gradient(shape: Any, seed: int) -> torch.Tensor:
    """Magnitudes over six decades, some zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (-6 * torch.rand(shape, generator=generator))
    return torch.randn(shape, generator=generator) * size * (torch.rand(shape, generator=generator) > 0.1)


def steps(optimizer: Any, params: Any, first: int, last: int) -> None:
    """With gradients that are the same however the parameters are cut."""
    for step in range(first, last):
        for number, p in enumerate(params):
            give(p, gradient(p.shape, 100 * step + number).to(p.dtype))
        optimizer.step()
        optimizer.zero_grad()


def give(p: Any, whole: torch.Tensor) -> None:
    if isinstance(p, RaggedTensor):
        p.grad = RaggedTensor.from_full(whole, p.spec)
    elif isinstance(p, DTensor):
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
    else:
        p.grad = whole


def check_equal(found: Any, expected: Any) -> None:
    """Nested state, to the bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            check_equal(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        found = full(found)
        assert type(found) in (torch.Tensor, nn.Parameter) and found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            check_equal(one, other)
    else:
        assert found == expected
