"""Models of checkpoints, and layouts to load them into."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import shardwright as sw
from tests.engine.kit.models import Model, build


def source_model(seed: int = 0) -> Model:
    """Tied, with buffers, one of them not stored, and parameters of no dimension and of hardly any size."""
    model = build(seed)
    model.head.weight = model.embed.weight
    model.scale = nn.Parameter(torch.tensor(float(seed)))
    model.few = nn.Parameter(torch.tensor([1.0, 2.0]) - seed)  # of three ranks one has nothing of it
    model.norm.register_buffer("count", torch.tensor([seed, 7]))
    model.blocks[0].register_buffer("table", torch.full((2,), float(seed)), persistent=False)
    return model


LAYOUTS: dict[str, dict[str, Any]] = {
    "per_parameter": {},
    "shard_1": {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None},
    "row": {"layout": "ragged"},
    "element": {"layout": sw.Ragged("element")},
}


def trained(seed: int, group: dist.ProcessGroup) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after a step, sharded over the ranks of a group; plain if it has one rank."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    if dist.get_world_size(group) > 1:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in (model[0], model[2], model):
            sw.fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    return model, optimizer
