"""Meshes with a tensor-parallel axis, and models over them."""

from __future__ import annotations

import functools

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.engine.kit.models import Model
from tests.support import world_mesh

Shape = tuple[int, ...]


#: Data-parallel axes, then the tensor-parallel one.
AXES = {2: ("dp", "tp"), 3: ("replicate", "dp", "tp")}


def mesh_of(shape: Shape) -> DeviceMesh:
    return world_mesh(*shape, names=AXES[len(shape)])


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]


def data_rank(mesh: DeviceMesh) -> int:
    data = data_mesh(mesh)
    here = data.get_coordinate()
    assert here is not None
    return functools.reduce(lambda n, axis: n * data.shape[axis] + here[axis], range(data.ndim), 0)


def plan_of(name: str) -> tuple[dict[str, ParallelStyle], dict[str, ParallelStyle]]:
    """The plans of a block and of what is outside of blocks."""
    if name == "blocks":  # everything else is on the data-parallel ranks alone
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}, {}
    if name == "tensor":
        return (
            {"up": ColwiseParallel(), "down": RowwiseParallel()},
            {
                "embed": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Replicate()),
            },
        )
    return (
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )


def parallelize(model: Model, mesh: DeviceMesh, plan: str, source: int | None = 0) -> Model:
    block_plan, rest = plan_of(plan)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], block_plan, src_data_rank=source)
    return parallelize_module(model, mesh["tp"], rest, src_data_rank=source)  # type: ignore[return-value]


def tokens(step: int, micro: int, data: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10_007 + micro * 101 + data)
    return torch.randint(0, 11, (2, 8), generator=generator)
