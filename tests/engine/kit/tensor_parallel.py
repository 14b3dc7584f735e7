"""Meshes with a tensor-parallel axis, and models over them."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
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

import shardwright as sw
from tests.engine.kit.models import Model, full
from tests.support import CaseFailed, WorkerPools, world_mesh

Shape = tuple[int, ...]
BF16, FP32 = torch.bfloat16, torch.float32
LAYOUTS: dict[str, Any] = {
    "per_parameter": "per_parameter",
    "row": "ragged",
    "2 rows": sw.Ragged(2),
    "element": sw.Ragged("element"),
}
#: Data-parallel axes, then the tensor-parallel one.
AXES = {2: ("dp", "tp"), 3: ("replicate", "dp", "tp")}

# torch tells of every gather over two axes that it could be one over a flattened mesh.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


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


def shard(
    model: Model, mesh: DeviceMesh, apply: Callable[..., Any] = sw.fully_shard, **options: Any
) -> Model:
    for block in model.blocks:
        apply(block, mesh=data_mesh(mesh), **options)
    apply([model.norm, model.head], mesh=data_mesh(mesh), **options)
    return apply(model, mesh=data_mesh(mesh), **options)  # type: ignore[no-any-return]


def on_meshes(cases: list[Any], timeout: float = 60.0) -> Callable[[Callable[..., Any]], Any]:
    """As ``multirank``, with as many ranks as the shape has that each case begins with."""

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        names = [n for n in inspect.signature(body).parameters if n not in ("rank", "world_size")]

        @functools.wraps(body)
        def case(worker_pools: WorkerPools, **arguments: Any) -> None:
            try:
                worker_pools.run(body, math.prod(arguments["shape"]), timeout=timeout, **arguments)
            except CaseFailed as failure:
                pytest.fail(str(failure), pytrace=False)

        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        case.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(n, keyword) for n in ("worker_pools", *names)]
        )
        case.multirank_body = body  # type: ignore[attr-defined]
        ids = [
            "-".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in row) for row in cases
        ]
        return pytest.mark.multirank(pytest.mark.parametrize(tuple(names), cases, ids=ids)(case))

    return decorate


def close(found: Any, wanted: Any, tolerance: float, name: str) -> None:
    assert found is not None, name
    assert found.shape == wanted.shape, name
    torch.testing.assert_close(
        full(found), wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}"
    )
