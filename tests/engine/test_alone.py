"""Axes of one rank that communicate: how a machine with one GPU runs NCCL in the engine's streams.

``LEAST_RANKS`` is a switch of tests. Users' models on one rank communicate nothing.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.engine.tensors import ranks
from tests.engine.kit.graphs import graphs
from tests.engine.kit.models import build, full, loss_of, tokens
from tests.engine.kit.training import units_of
from tests.support import multirank, world_mesh
from tests.support.stand_in import stand_in_device

BF16 = sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
SETTINGS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "zero3": ((1,), {}),
    "bfloat16": ((1,), {"mp_policy": BF16}),
    "arena": ((1,), {"mp_policy": BF16, "memory": "arena"}),
    "zero2": ((1,), {"strategy": "zero2"}),
    "zero1": ((1,), {"strategy": "zero1"}),
    "ddp": ((1,), {"strategy": "ddp"}),
    "ragged": ((1,), {"layout": "ragged", "memory": "max_pool"}),
    "hsdp": ((1, 1), {"strategy": "hsdp"}),
    "a graph": ((1,), {"mp_policy": BF16, "graph": True}),
    "a graph in the arena": ((1,), {"mp_policy": BF16, "memory": "arena", "graph": True}),
}


@multirank(1)
@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_training_equals_the_plain_model(rank: int, world_size: int, setting: str, accelerator: bool) -> None:
    shape, options = SETTINGS[setting][0], dict(SETTINGS[setting][1])
    graphed = options.pop("graph", False)
    root = {key: options.pop(key) for key in ("memory",) if key in options}
    names = ("replicate", "shard")[-len(shape) :]
    plain = build(layers=3)
    with pytest.MonkeyPatch.context() as patch, stand_in_device() if accelerator else nullcontext():
        patch.setattr(ranks, "LEAST_RANKS", 1)
        model = copy.deepcopy(plain)
        mesh = world_mesh(*shape, names=names)
        for block in model.blocks:
            sw.fully_shard(block, mesh=mesh, **options)
        sw.fully_shard(model, mesh=mesh, **options, **root)
        unit = units_of(model)[0]
        assert len(unit.ranks.every) == len(shape) and all(
            comm.group is not None for comm in unit.ranks.every
        )

        def function(each: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
            loss = loss_of(each(batch), batch)
            loss.backward()
            return loss.detach()

        tolerance = 5e-2 if "mp_policy" in options else 1e-5  # bfloat16 has 8 bits
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        with graphs(model) if graphed else nullcontext():
            step: Any = sw.GraphedStep(model, lambda batch: function(model, batch)) if graphed else None
            for number in range(6):
                batch = tokens(number, 0, 0)
                found = step(batch) if graphed else function(model, batch)
                torch.testing.assert_close(found, function(plain, batch), rtol=tolerance, atol=tolerance)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p), q, rtol=tolerance, atol=tolerance)


@multirank(1)
def test_otherwise_one_rank_communicates_nothing(rank: int, world_size: int) -> None:
    model = sw.fully_shard(build(), mesh=world_mesh(1))
    assert units_of(model)[0].ranks.every == []
