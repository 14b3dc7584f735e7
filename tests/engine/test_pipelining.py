"""torch's own pipeline schedules over sharded stages: two stages of two ranks each, against the plain model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import shardwright as sw
from tests.engine.kit.models import Block, full
from tests.support import multirank, world_mesh

MICROS = 4


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(7, 12), Block(7, 12), nn.Linear(7, 7)) for _ in range(count)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def data(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(2 * MICROS, 7, generator=generator), torch.randn(2 * MICROS, 7, generator=generator)


#: And how many stages there are on two ranks, and whether they lie in the shape of a V.
SCHEDULES = {
    "GPipe": (ScheduleGPipe, 2, False),
    "1F1B": (Schedule1F1B, 2, False),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 4, False),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, 4, False),
    "ZBV": (ScheduleZBVZeroBubble, 4, True),
    "DualPipeV": (ScheduleDualPipeV, 4, True),
}


def reductions(modules: Iterable[nn.Module]) -> list[int]:
    """Counts the reductions of all units, from now on."""
    count = [0]
    for unit in (u for module in modules for u in module._fsdp_units(recurse=True)):

        def reduce(*given: Any, unit: Any = unit, before: Any = unit.gradients.reduce) -> Any:
            count[0] += unit.settings.sync
            return before(*given)

        unit.gradients.reduce = reduce
    return count


@pytest.mark.extensive("each schedule in each layout", but=("1F1B-per_parameter-*",))
@multirank(4)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_schedules(rank: int, world_size: int, name: str, layout: str) -> None:
    """As for FSDP2: nothing is said of the schedule, which reduces each unit once, after the last micro-batch."""
    if SCHEDULES[name][2] and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 sends to itself over gloo where two stages of one rank follow each other")
    ways = {
        "per_parameter": [("zero3", True), ("zero3", False)],
        "ragged": [("zero3", None), ("zero1", None)],
    }
    for strategy, reshard in ways[layout]:
        check(name, layout, strategy, reshard)


def check(name: str, layout: str, strategy: str, reshard: bool | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    group, place, replica = mesh.get_group("pipe"), mesh.get_local_rank("pipe"), mesh.get_local_rank("data")
    schedule_class, count, v_shaped = SCHEDULES[name]
    places = [0, 1, 1, 0] if v_shaped else [0, 1, 0, 1]
    plain, mine = stages(count), {i: m for i, m in enumerate(stages(count)) if places[i] == place}
    options: dict[str, Any] = {"mesh": mesh["data"], "layout": layout, "strategy": strategy}
    for module in mine.values():
        for each in (module[0], module[1], module):
            sw.fully_shard(each, reshard_after_forward=reshard, **options)
    made = [PipelineStage(m, i, count, torch.device("cpu"), group=group) for i, m in mine.items()]
    several: Any = made if len(made) > 1 else made[0]
    schedule = schedule_class(several, MICROS, loss_of)
    parameters = [p for m in mine.values() for p in m.parameters()]
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(parameters, lr=0.1))
    expected = torch.optim.SGD([p for m in plain for p in m.parameters()], lr=0.1)
    counted = reductions(mine.values())
    for step in range(2):
        x, target = data(step, replica)
        counted[0] = 0
        schedule.step(*([x] if 0 in mine else []), target=target if count - 1 in mine else None)
        if step:  # in the first, torch runs each stage once more, to look at its outputs
            assert counted == [3 * len(mine)], counted
        for r in range(2):
            x, target = data(step, r)
            y = x
            for module in plain:
                y = module(y)
            (loss_of(y, target) / 2).backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
        for i, module in mine.items():
            for (n, p), q in zip(module.named_parameters(), plain[i].parameters(), strict=True):
                torch.testing.assert_close(full(p), q, rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")


@multirank(2)
def test_split_backward_needs_the_whole_stage_sharded(rank: int, world_size: int) -> None:
    """FSDP2 loses the gradients."""
    stage = stages(1)[0]
    sw.fully_shard(stage[0], mesh=world_mesh(world_size))
    x = torch.ones(2, 7, requires_grad=True)
    y = stage(x)
    with pytest.raises(RuntimeError, match="The module of the stage is not sharded"):
        stage_backward_input([y], [torch.ones_like(y)], [x], stage.parameters())


@multirank(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_what_is_held_is_reduced_by_finalize_backward(rank: int, world_size: int, strategy: str) -> None:
    """As torch 2.15's stages call it."""
    plain = stages(1)[0]
    model: Any = sw.fully_shard(copy.deepcopy(plain), strategy=strategy)
    model.finalize_backward()  # before the first forward
    for step in range(2):
        model.zero_grad()
        plain.zero_grad()
        model.set_manual_backward_finalization(True)
        model.set_reshard_after_backward(strategy == "ddp")
        model.set_requires_gradient_sync(False)
        for micro in range(2):
            loss_of(model(data(10 * step + micro, rank)[0]), data(10 * step + micro, rank)[1]).backward()
            for r in range(world_size):
                x, y = data(10 * step + micro, r)
                (loss_of(plain(x), y) / world_size).backward()
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        handle = model.finalize_backward(async_op=bool(step))
        if step:
            handle.wait()
        model.set_manual_backward_finalization(False)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad)
