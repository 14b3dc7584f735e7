"""How many operations the engine adds to a step: a count, so it is the same on every machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from tests.support.fake import fake_ranks


class Counting(TorchDispatchMode):
    """Counts what is dispatched, by the name of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_step(model: Any, dtype: torch.dtype) -> Counter[str]:
    """The calls of a forward and backward, after two whole steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 8, dtype=dtype)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with Counting() as counting:
        model(x).sum().backward()
    return counting.calls


def calls_of_one_more_layer(sharded: bool, dtype: torch.dtype) -> Counter[str]:
    policy = sw.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    calls = []
    for layers in (3, 4):
        model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        if sharded:
            for layer in model:
                sw.fully_shard(layer, mp_policy=policy)
            sw.fully_shard(model, mp_policy=policy)
        else:
            model.to(dtype)
        calls.append(calls_of_a_step(model, dtype))
    calls[1].subtract(calls[0])
    return calls[1]


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 5), (torch.bfloat16, 7)], ids=str)
def test_operations_of_a_unit(dtype: torch.dtype, allowed: int) -> None:
    """Two gathers, a reduction and what brings gradients together; in half precision also casts."""
    with fake_ranks(8):
        added = calls_of_one_more_layer(True, dtype)
    added.subtract(calls_of_one_more_layer(False, dtype))
    assert sum(added.values()) <= allowed, {name: n for name, n in added.items() if n}
