"""Memory that is made in another mode than it is used in, or again after a change of the transport."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.support import multirank

BF16 = torch.bfloat16


@multirank(2)
@pytest.mark.parametrize("dtype", [None, BF16])
def test_sharded_under_inference_mode(rank: int, world_size: int, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    model: Any = copy.deepcopy(plain)
    with torch.inference_mode():
        sw.fully_shard(model, mp_policy=sw.PrecisionPolicy(param_dtype=dtype))
    x = torch.ones(2, 6)
    model(x).float().sum().backward()
    if dtype is None:
        plain(x).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), plain.weight.grad)
    assert model.weight.grad.full_tensor().isfinite().all()


@multirank(2)
def test_full_precision_stays_after_a_change_of_the_transport(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    policy = sw.PrecisionPolicy(param_dtype=BF16, full_precision_in_eval=True)
    model: Any = sw.fully_shard(copy.deepcopy(plain), mp_policy=policy).eval()
    x = torch.randn(2, 6)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
            model.set_all_gather_codec(None)
