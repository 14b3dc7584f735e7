"""Memory that runs out anywhere in a step leaves no trace: the next steps are exact."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.engine.memory import Slab
from tests.engine.cases.base import CASES, FP32, Batch, Net, loss_of
from tests.engine.cases.running import TOLERANCE, reference_step
from tests.engine.programs import differences
from tests.support import multirank


@pytest.mark.extensive("each setting", but=("True-*",))
@multirank(2, timeout=30.0)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("hold", [False, True])
def test_out_of_memory_anywhere_leaves_no_trace(
    rank: int, world_size: int, reshard: bool | None, hold: bool
) -> None:
    """The n-th request for memory fails on every rank, for every n of a step; the next steps are exact."""
    os.environ["SHARDWRIGHT_POISON"] = "1"
    torch.manual_seed(0)
    plain: Any = Net()
    model: Any = copy.deepcopy(plain)
    for unit in [*model.blocks, model]:
        sw.fully_shard(unit, reshard_after_forward=reshard)
    batches = [Batch(0, 0, 1, r, world_size, FP32) for r in range(world_size)]
    reference_step(CASES["plain"], plain, batches[rank], FP32)
    x = batches[rank].x
    failures = 0
    for n in itertools.count():
        model.set_requires_gradient_sync(not hold)
        with memory_runs_out(n) as asked:
            try:
                loss_of(model(x)).backward()
            except torch.OutOfMemoryError:
                failures += 1
        model.set_requires_gradient_sync(True)
        model.zero_grad()
        loss_of(model(x)).backward()
        found = differences(model, plain, TOLERANCE)
        assert not found, f"after request {n} failed:\n" + "\n".join(found)
        model.zero_grad()
        if asked[0] <= n:
            break
    assert failures >= 4  # at least each unit's gather


@contextmanager
def memory_runs_out(n: int) -> Iterator[list[int]]:
    """The ``n``-th lease (from 0) raises; yields how many there were."""
    asked = [0]
    original = Slab.lease

    def lease(self: Slab) -> None:
        asked[0] += 1
        if asked[0] == n + 1:
            raise torch.OutOfMemoryError("out of memory, as the test asked for")
        original(self)

    Slab.lease = lease  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        Slab.lease = original  # type: ignore[method-assign]
