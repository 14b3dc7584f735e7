"""Optimizers that step in backward: the bits of the ordinary step, and gradients that are gone at once."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright._torch import memory_can_be_swapped
from tests.engine.models import Model, build, full, loss_of, shard, tokens
from tests.engine.test_strategies import On, on, on_meshes
from tests.support import multirank
from tests.support.matrix import select, together

FP32, BF16 = torch.float32, torch.bfloat16

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "AdamW-fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
}
#: Micro-batches of a step, and which of the three ways says that more come.
ACCUMULATION = ["none", "not synced", "not last", "not all-reduced"]


class Row(NamedTuple):
    at: On
    layout: str
    memory: str
    reduce: torch.dtype | None
    accumulation: str
    optimizer: str


def rows() -> list[Row]:
    at = [
        *on("ddp", (2,)),
        *on("zero1", (2,), (2, 2)),
        *on("zero2", (3,)),
        *on("zero3", (1,), (2,), (4,)),
        *on("hsdp", (2, 2)),
        *on("hfsdp", (2, 2)),
        *on("1-2", (2, 2)),
    ]
    memory = ["dynamic", "arena", "max_pool"] if memory_can_be_swapped else ["dynamic"]
    product = itertools.product(at, ["per_parameter", "ragged"], memory, [None, FP32], ACCUMULATION, OPTIMIZERS)
    return select([Row(*row) for row in product], lambda row, strength: together(strength, *row))


def set_more(model: Model, way: str, more: bool) -> None:
    if way == "not synced":
        model.set_requires_gradient_sync(not more)
    elif way == "not last":
        model.set_is_last_backward(not more)
    elif way == "not all-reduced":
        # On meshes of one axis there is nothing to leave out but the step.
        model.set_requires_all_reduce(not more)


def train(model: Model, optimizer: Any, rank: int, steps: int = 3, way: str = "none", first: int = 0) -> None:
    for step in range(first, first + steps):
        micros = 1 if way == "none" else 2
        for micro in range(micros):
            set_more(model, way, micro + 1 < micros)
            batch = tokens(step, micro, rank)
            loss_of(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local()), name


def no_gradients(model: nn.Module) -> bool:
    return all(p.grad is None for p in model.parameters())


@on_meshes(rows())
def test_bits_of_the_ordinary_step(rank: int, world_size: int, at: On, layout: str, memory: str,
                                   reduce: torch.dtype | None, accumulation: str, optimizer: str) -> None:  # fmt: skip
    models = []
    for wrap in (sw.fully_shard_optimizer, sw.optim.in_backward):
        policy = sw.MixedPrecisionPolicy(param_dtype=BF16 if reduce else None, reduce_dtype=reduce)
        options: dict[str, Any] = {"mesh": at.mesh, "strategy": at.strategy, "layout": layout, "mp_policy": policy}
        model = build()
        for block in model.blocks:
            sw.fully_shard(block, **options)
        sw.fully_shard([model.norm, model.head], **options)
        sw.fully_shard(model, memory=memory, **options)
        made = wrap(OPTIMIZERS[optimizer](model.parameters()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
        for step in range(3):
            train(model, made, rank, 1, accumulation, step)
            scheduler.step()
        models.append(model)
    assert_same(*models)
