"""Tensor, sequence and expert parallelism under every strategy and layout, against the plain model and torch's FSDP2.

Data differ between data-parallel ranks and are the same in a tensor-parallel group. Of the generated rows those run
that tests/support/matrix.py selects.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import shardwright as sw
from shardwright.engine.ragged import RaggedTensor
from tests.engine.models import Model, Reference, build, full, loss_of
from tests.support import CaseFailed, WorkerPools, multirank, world_mesh
from tests.support.matrix import select, together

BF16, FP32 = torch.bfloat16, torch.float32
Shape = tuple[int, ...]
#: Data-parallel axes, then the tensor-parallel one.
AXES = {2: ("dp", "tp"), 3: ("replicate", "dp", "tp")}
LAYOUTS: dict[str, Any] = {
    "per_parameter": "per_parameter",
    "row": "ragged",
    "2 rows": sw.Ragged(2),
    "element": sw.Ragged("element"),
}
#: (compute, reduce, tolerance): bf16 partial sums over tensor-parallel ranks round where the plain model's do not.
PRECISIONS = {"fp32": (FP32, FP32, 1e-5), "bf16-fp32": (BF16, FP32, 6e-2), "bf16-bf16": (BF16, BF16, 6e-2)}

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
    if name == "blocks":  # all else lies on the data-parallel ranks alone
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


def parallelize(model: Model, mesh: DeviceMesh, plan: str) -> Model:
    block_plan, rest = plan_of(plan)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], block_plan)
    return parallelize_module(model, mesh["tp"], rest)  # type: ignore[return-value]


def shard(model: Model, mesh: DeviceMesh, apply: Callable[..., Any] = sw.fully_shard, **options: Any) -> Model:
    for block in model.blocks:
        apply(block, mesh=data_mesh(mesh), **options)
    apply([model.norm, model.head], mesh=data_mesh(mesh), **options)
    return apply(model, mesh=data_mesh(mesh), **options)  # type: ignore[no-any-return]


def tokens(step: int, micro: int, data: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10_007 + micro * 101 + data)
    return torch.randint(0, 11, (2, 8), generator=generator)


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
        ids = ["-".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in row) for row in cases]
        return pytest.mark.multirank(pytest.mark.parametrize(tuple(names), cases, ids=ids)(case))

    return decorate


# -- training ----------------------------------------------------------------------------------------------------------


def _cases() -> list[tuple[Any, ...]]:
    flat = itertools.product(
        [(2, 1), (1, 2), (2, 2), (1, 4), (4, 1)],
        ("ddp", "zero1", "zero2", "zero3"),
        LAYOUTS,
        ("blocks", "tensor", "sequence"),
        PRECISIONS,
        ("single", "communicate", "hold", "last"),
        (None, True, False, 2),
    )
    deep = itertools.product(
        [(2, 1, 2), (1, 2, 2), (2, 2, 1)],
        ("hsdp", "hfsdp", "zero1", "ddp"),
        LAYOUTS,
        ("blocks", "tensor", "sequence"),
        PRECISIONS,
        ("single", "communicate", "hold", "last"),
        (None, True, False),
    )

    def legal(shape: Shape, strategy: str, reshard: Any) -> bool:
        if strategy in ("zero1", "zero2") and reshard in (True, 2):
            return False
        return reshard != 2 or (strategy == "zero3" and shape[0] % 2 == 0)

    rows = [row for row in (*flat, *deep) if legal(row[0], row[1], row[-1])]
    return select(rows, lambda row, strength: together(strength, *row))


@on_meshes(_cases())
def test_training_equals_the_plain_model(
    rank: int,
    world_size: int,
    shape: Shape,
    strategy: str,
    layout: str,
    plan: str,
    precision: str,
    accumulation: str,
    reshard: bool | int | None,
) -> None:
    compute, reduce, tolerance = PRECISIONS[precision]
    mesh = mesh_of(shape)
    plain = build()
    reference = Reference(plain, compute, reduce)
    model = shard(
        parallelize(plain, mesh, plan),
        mesh,
        strategy=strategy,
        layout=LAYOUTS[layout],
        reshard_after_forward=reshard,
        mp_policy=sw.MixedPrecisionPolicy(
            param_dtype=None if compute is FP32 else compute,
            reduce_dtype=None if reduce is compute else reduce,
            cast_forward_inputs=False,
        ),
    )
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    expected = torch.optim.SGD(reference.model.parameters(), lr=0.2, momentum=0.9)
    replicas, here = data_mesh(mesh).size(), data_rank(mesh)
    micros = 1 if accumulation == "single" else 2
    for step in range(2):
        batches = [[tokens(step, m, d) for d in range(replicas)] for m in range(micros)]
        losses = []
        for i, micro in enumerate(batches):
            model.set_requires_gradient_sync(accumulation != "hold" or i == micros - 1)
            model.set_is_last_backward(accumulation != "last" or i == micros - 1)
            loss = loss_of(model(micro[here]), micro[here])
            loss.backward()
            losses.append(loss.item())
        wanted = reference.backward(replicas, batches)
        if here == 0:
            assert losses == pytest.approx(wanted, rel=tolerance)
        for (name, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
            close(p.grad, q.grad, tolerance, f"gradient of {name}")
        norm = sw.clip_grad_norm_(model.parameters(), 0.7)
        own = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.7)
        torch.testing.assert_close(norm, own, rtol=tolerance, atol=tolerance)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    for (name, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
        close(p, q, tolerance, name)


def close(found: Any, wanted: Any, tolerance: float, name: str) -> None:
    assert found is not None, name
    assert found.shape == wanted.shape, name
    torch.testing.assert_close(full(found), wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")
