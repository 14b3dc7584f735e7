"""This project's engine: its strategies, with torch's allocator and with planned memory, and both transports."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from benchmarks.peers.by_torch import training
from benchmarks.peers.shapes import blocks_of
from benchmarks.peers.step import CLIP, Step, adamw_options


def shardwright(
    strategy: str, memory: str = "dynamic", *, gloo: bool = False
) -> Callable[[nn.Module, str], Step]:
    """`gloo`: collectives go through gloo, as between hosts, and not through memory that the processes share."""

    def build(model: nn.Module, adamw: str) -> Step:
        if gloo:
            os.environ["SHARDWRIGHT_CPU_COLLECTIVES"] = "gloo"  # each contender has processes of its own
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks_of(model):
            sw.fully_shard(block, mesh=mesh, strategy=strategy)
        sw.fully_shard(model, mesh=mesh, strategy=strategy, memory=memory)
        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), **adamw_options(adamw)))
        return training(model, optimizer, lambda: sw.clip_grad_norm_(model.parameters(), CLIP))

    return build
