"""The host's work for one unit does not depend on the number of units. Counted, so it is the same on every machine.

Counted are the instructions of Python's interpreter. So a loop over all units within the work for one unit shows, even
if it calls nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.support.fake import fake_ranks

SIZES = 6, 24


class Block(nn.Module):
    """12 or 13 parameters."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(torch.eye(8)) for _ in range(10)])
        self.rows = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2 + number % 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in self.matrices:
            x = x @ matrix
        for row in self.rows:
            x = x * row
        return x


def instructions(work: Callable[[], Any]) -> int:
    """The number of instructions that the interpreter runs in ``work``."""
    count = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return local

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    gc.disable()  # it runs finalizers at any time
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def counts(units: int, memory: str, dtype: torch.dtype | None) -> dict[str, int]:
    """Counts of each part of three steps of training."""
    policy = sw.MixedPrecisionPolicy(dtype, torch.float32)
    model = nn.Sequential(*(Block(number) for number in range(units)))
    optimizer: Any = None

    def shard() -> None:
        for block in model:
            sw.fully_shard(block, mp_policy=policy)
        sw.fully_shard(model, mp_policy=policy, memory=memory)

    def shard_optimizer() -> None:
        nonlocal optimizer
        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))

    def compute() -> None:
        model(torch.ones(2, 8)).float().sum().backward()

    def update() -> None:
        sw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    found = {"set-up": instructions(shard), "set-up of the optimizer": instructions(shard_optimizer)}
    for step in ("first", "second, which plans", "steady"):
        found[f"{step}: forward and backward"] = instructions(compute)
        found[f"{step}: clipping and AdamW"] = instructions(update)
    return found


@pytest.mark.extensive("each kind of memory")
@pytest.mark.parametrize(
    ("memory", "dtype"), [("dynamic", None), ("arena", torch.bfloat16), ("max_pool", None)], ids=str
)
def test_work_for_a_unit_does_not_grow_with_the_units(memory: str, dtype: torch.dtype | None) -> None:
    few, many = SIZES
    with fake_ranks(8):
        counts(2, memory, dtype)  # what is done once in a process
        before, after = counts(few, memory, dtype), counts(many, memory, dtype)
    for part, count in before.items():
        growth = (after[part] / many) / (count / few)
        # Less than 1, because the root's own work is shared by more units; a loop over all units makes it larger. The
        # search for a plan is not as regular.
        most = 1.05 if "plans: forward" in part else 1.005
        assert 0.85 < growth < most, (
            f"{part}: {count / few:.0f} and {after[part] / many:.0f} instructions for a unit"
        )
