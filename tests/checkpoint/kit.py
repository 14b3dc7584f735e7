"""Models of checkpoints, and layouts to load them into."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
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
