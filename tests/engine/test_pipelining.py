"""torch's own pipeline schedules over sharded stages: two stages of two ranks each, against the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import shardwright as sw
from tests.engine.models import Block, full
from tests.support import multirank

MICROS = 4


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(7, 12), Block(7, 12), nn.Linear(7, 7)) for _ in range(count)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def data(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(2 * MICROS, 7, generator=generator), torch.randn(2 * MICROS, 7, generator=generator)


SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B}


@multirank(4)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("communication", ["each", "held"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_schedules(rank: int, world_size: int, name: str, communication: str, layout: str) -> None:
    """``held``: gradients of all micro-batches are reduced once, by the optimizer's step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    group, place, replica = mesh.get_group("pipe"), mesh.get_local_rank("pipe"), mesh.get_local_rank("data")
    count = 4 if name.startswith("Interleaved") else 2
    plain, mine = stages(count), {i: m for i, m in enumerate(stages(count)) if i % 2 == place}
    for module in mine.values():
        sw.wrap.auto_wrap(module, {Block}, mesh=mesh["data"], layout=layout, strategy="zero3")
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(communication == "each")
    sw.share_comm_ctx(list(mine.values()))
    made = [PipelineStage(m, i, count, torch.device("cpu"), group=group) for i, m in mine.items()]
    several: Any = made if len(made) > 1 else made[0]
    # The schedule divides .grad, which is not there yet while gradients are held: the loss is divided instead.
    scale = communication == "each"
    schedule = SCHEDULES[name](
        several, MICROS, lambda y, t: loss_of(y, t) / (1 if scale else MICROS), scale_grads=scale
    )
    parameters = [p for m in mine.values() for p in m.parameters()]
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(parameters, lr=0.1))
    expected = torch.optim.SGD([p for m in plain for p in m.parameters()], lr=0.1)
    for step in range(2):
        x, target = data(step, replica)
        first, last = ([x] if 0 in mine else []), (target if count - 1 in mine else None)
        schedule.step(*first, target=last)
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
