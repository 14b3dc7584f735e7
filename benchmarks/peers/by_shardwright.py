"""This project's engine: its strategies, with torch's allocator and with planned memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from benchmarks.peers.by_torch import training
from benchmarks.peers.shapes import blocks_of
from benchmarks.peers.step import CLIP, Step, adamw_options


def shardwright(strategy: str, memory: str = "dynamic") -> Callable[[nn.Module, str], Step]:
    def build(model: nn.Module, adamw: str) -> Step:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks_of(model):
            sw.fully_shard(block, mesh=mesh, strategy=strategy)
        sw.fully_shard(model, mesh=mesh, strategy=strategy, memory=memory)
        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), **adamw_options(adamw)))
        return training(model, optimizer, lambda: sw.clip_grad_norm_(model.parameters(), CLIP))

    return build
