"""Python calls and operations that sharding adds to clipping and to a step, for each parameter: counts, not times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from tests.support.fake import fake_ranks


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def counts(work: Callable[[], Any]) -> tuple[int, int]:
    """Python calls and dispatched operations."""
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    with Operations() as operations:
        work()
    return calls, operations.count


def counts_of(kind: str, layers: int, sharded: bool) -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    if sharded:
        sw.fully_shard(model)
    model(torch.ones(2, 16)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    clip: Any = nn.utils.clip_grad_norm_
    if sharded:
        optimizer, clip = sw.fully_shard_optimizer(optimizer), sw.clip_grad_norm_
    parameters = list(model.parameters())
    work = optimizer.step if kind == "step" else lambda: clip(parameters, 1.0)
    for _ in range(2):
        work()
    return counts(work)


@pytest.mark.parametrize(("kind", "allowed"), [("step", 8), ("clip", 5)])
def test_what_a_parameter_adds(kind: str, allowed: int) -> None:
    """As many operations as on plain tensors, and a few calls: lookups by parameter, and its two forms of state."""
    with fake_ranks(8):
        added = []
        for sharded in (False, True):
            few, many = (counts_of(kind, layers, sharded) for layers in (4, 14))
            added.append([(b - a) / 20 for a, b in zip(few, many, strict=True)])  # a layer has two parameters
    (plain_calls, plain_operations), (calls, operations) = added
    assert operations == plain_operations
    assert 0 < calls - plain_calls <= allowed, (calls, plain_calls)
