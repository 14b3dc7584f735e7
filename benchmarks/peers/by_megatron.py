"""Megatron-FSDP (``pip install megatron-fsdp``). Version 0.6.1 needs CUDA: on CPU ranks its row has its own error."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers.by_torch import torch_clip, training
from benchmarks.peers.shapes import blocks_of
from benchmarks.peers.step import Step, adamw_options


def megatron_fsdp(model: nn.Module, adamw: str) -> Step:
    import megatron_fsdp as library

    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options(adamw))
    sharded, optimizer = library.fully_shard(
        model,
        optimizer,
        device_mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)),
        dp_shard_dim="dp",
        fsdp_unit_modules=list({type(block) for block in blocks_of(model)}),
        zero_dp_strategy=3,
        device=torch.device("cpu"),
    )
    return training(sharded, optimizer, torch_clip(sharded))
