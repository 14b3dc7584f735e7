"""Planned memory where gradients outlive the optimizer's step: nothing is leased outside the plan, no bit changes."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.extend import memories
from tests.engine.kit.models import Model, build, full, loss_of, shard, tokens
from tests.support import multirank

POOLS = [memory.name for memory in memories if memory.plans == "units"]
LOOPS = ("some parameters", "zeroed in place", "zeroed after forward", "never zeroed")


def train(model: Model, loop: str, rank: int, steps: int) -> list[torch.Tensor]:
    parameters: list[Any] = [p for p in model.parameters() if loop != "some parameters" or p.ndim == 2]
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(parameters, lr=1e-2))
    for number in range(steps):
        batch = tokens(number, 0, rank)
        loss = loss_of(model(batch), batch)
        if loop == "zeroed after forward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loop in ("some parameters", "zeroed in place"):
            optimizer.zero_grad(set_to_none=loop == "some parameters")
    return [full(t).detach().clone() for p in model.parameters() for t in (p, p.grad) if t is not None]


@pytest.mark.extensive("each strategy")
@multirank(2)
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
def test_gradients_that_stay_are_planned_for(rank: int, world_size: int, strategy: str) -> None:
    plain = build()
    for loop in LOOPS:
        expected = train(shard(copy.deepcopy(plain), strategy=strategy), loop, rank, 5)
        model = copy.deepcopy(plain)
        for block in model.blocks:
            sw.fully_shard(block, strategy=strategy)
        sw.fully_shard(model, strategy=strategy, memory="arena", strict=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results = train(model, loop, rank, 5)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), loop
        planned, outside = sw.memory_report(model).leases
        assert planned > 0 and outside == 0, loop


@multirank(2)
def test_pools_that_no_unit_would_share_are_refused(rank: int, world_size: int) -> None:
    for strategy, memory in itertools.product(("zero1", "zero2"), POOLS):
        model = build()
        for block in model.blocks:
            sw.fully_shard(block, strategy=strategy)
        sw.fully_shard(model, strategy=strategy, memory=memory)
        with pytest.raises(
            ValueError, match=r"keeps the full parameters of unit .* so no slot ever becomes free"
        ):
            model(tokens(0, 0, rank))
    kept = r"reshard_after_forward=False keeps the full parameters of unit 'blocks.0' and of all other units"
    for memory in POOLS:
        model = build()
        for block in model.blocks:
            sw.fully_shard(block, reshard_after_forward=False)
        sw.fully_shard(model, memory=memory)
        with pytest.raises(ValueError, match=kept):
            model(tokens(0, 0, rank))
        model.blocks[0].set_reshard_after_forward(True)  # the message's way out
        model(tokens(0, 0, rank))
        with pytest.raises(ValueError, match="the root is the only unit with parameters"):
            sw.fully_shard(build(), memory=memory)(tokens(0, 0, rank))


@multirank(2)
def test_units_that_keep_parameters_since_the_first_call_are_found_where_the_plan_is_made(
    rank: int, world_size: int
) -> None:
    model = build()
    for block in model.blocks:
        sw.fully_shard(block)
    sw.fully_shard(model, memory="max_pool")
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = tokens(0, 0, rank)
    loss_of(model(batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.set_reshard_after_forward(False)
    for _ in range(2):
        with pytest.raises(ValueError, match="reshard_after_forward=False keeps the full parameters of unit"):
            model(batch)
    model.set_reshard_after_forward(True)
    loss_of(model(batch), batch).backward()
    optimizer.step()
    assert sw.memory_report(model, optimizer).leases[0] > 0
