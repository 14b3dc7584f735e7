"""Two ranks that share one device over gloo: what each does, for a GPU and, as a rehearsal, for the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from tests.engine.kit.models import build, full, loss_of, shard, tokens

SETTINGS: list[dict[str, object]] = [
    {},
    {"layout": "ragged", "reshard_after_forward": False},
    {"strategy": "zero1"},
    {"strategy": "ddp"},
    {"mp_policy": sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
]


def train_as_one(rank: int, world_size: int, device: torch.device) -> None:
    """The ranks train on different data. Parameters and gradients equal a plain model's on the same device."""
    mesh = init_device_mesh(device.type, (world_size,))
    for options in SETTINGS:
        plain = build().to(device)
        model = copy.deepcopy(plain)
        for block in model.blocks:
            sw.fully_shard(block, mesh=mesh, **options)
        sw.fully_shard(model, mesh=mesh, memory="dynamic" if options else "arena", **options)
        tolerance = 5e-2 if "mp_policy" in options else 1e-5
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        for step in range(3):
            for each in optimizers:
                each.zero_grad()
            for micro in range(2):
                batches = [tokens(step, micro, each).to(device) for each in range(world_size)]
                loss_of(model(batches[rank]), batches[rank]).backward()
                sum(loss_of(plain(batch), batch) / world_size for batch in batches).backward()
            sw.clip_grad_norm_(model.parameters(), 1.0)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            for (name, q), p in zip(plain.named_parameters(), model.parameters(), strict=True):
                label = f"{options}, step {step}, {name}"
                assert full(p.grad).device.type == device.type
                torch.testing.assert_close(full(p.grad), q.grad, rtol=tolerance, atol=tolerance, msg=label)
            for each in optimizers:
                each.step()
            for (name, q), p in zip(plain.named_parameters(), model.parameters(), strict=True):
                label = f"{options}, step {step}, {name}"
                torch.testing.assert_close(full(p), q, rtol=tolerance, atol=tolerance, msg=label)


def refuse_divergence(rank: int, world_size: int, device: torch.device) -> None:
    """A rank that skips a step is named on both, at the next gather or reduction."""
    mesh = init_device_mesh(device.type, (world_size,))
    model = shard(build().to(device), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = tokens(0, 0, rank).to(device)
    loss_of(model(batch), batch).backward()
    if rank == 0:
        optimizer.step()
    with pytest.raises(RuntimeError, match="older weights than others"):
        loss_of(model(batch), batch).backward()


def on_first_gpu(rank: int, world_size: int, store: str) -> None:
    """The work of a process that is started for it."""
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")  # a mesh would choose a device by the rank where none is in use
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{store}")
    try:
        train_as_one(rank, world_size, torch.device("cuda", 0))
        refuse_divergence(rank, world_size, torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()
