"""Tensor and sequence parallelism under every strategy and layout, against the plain model and torch's FSDP2.

Data differ between data-parallel ranks and are the same in a tensor-parallel group. Of the generated rows those run
that tests/support/matrix.py selects. Clipping and refusals are here, too.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Shard

import shardwright as sw
from tests.engine.kit.models import Reference, build, full, loss_of
from tests.engine.kit.tensor_parallel import (
    BF16,
    FP32,
    LAYOUTS,
    Shape,
    close,
    data_mesh,
    data_rank,
    mesh_of,
    on_meshes,
    parallelize,
    shard,
    tokens,
)
from tests.support import multirank, world_mesh
from tests.support.matrix import select, together

#: (compute, reduce, tolerance): bf16 partial sums over tensor-parallel ranks round where the plain model's do not.
PRECISIONS = {"fp32": (FP32, FP32, 1e-5), "bf16-fp32": (BF16, FP32, 6e-2), "bf16-bf16": (BF16, BF16, 6e-2)}


# -- training ----------------------------------------------------------------------------------------------------------


def _cases() -> list[tuple[Any, ...]]:
    flat = itertools.product(
        [(1, 2), (2, 2), (4, 1)],
        ("ddp", "zero1", "zero2", "zero3"),
        ("per_parameter", "row", "element"),
        ("blocks", "tensor", "sequence"),
        PRECISIONS,
        ("single", "communicate", "hold", "last"),
        (None, True, False, 2),
    )
    deep = itertools.product(
        [(2, 1, 2), (1, 2, 2)],
        ("hsdp", "hfsdp"),
        ("per_parameter", "row", "element"),
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


@pytest.mark.extensive("each mesh")
@on_meshes([((2, 2),), ((1, 4),), ((2, 1, 2),)])
def test_training_equals_torchs_own(rank: int, world_size: int, shape: Shape) -> None:
    """Placements, shards, losses, gradients and norms, bit by bit: the sums have the same order."""
    mesh = mesh_of(shape)
    models = [shard(parallelize(build(), mesh, "sequence"), mesh, apply) for apply in (fsdp2, sw.fully_shard)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True) for model in models]
    batch = tokens(0, 0, data_rank(mesh))
    for _ in range(2):
        losses, norms = [], []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = loss_of(model(batch), batch)
            loss.backward()
            losses.append(loss)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
            optimizer.step()
        assert torch.equal(*losses)
        assert torch.equal(*norms)
        theirs, ours = (dict(model.named_parameters()) for model in models)
        assert list(theirs) == list(ours)
        same_tensors([p.grad for p in theirs.values()], [p.grad for p in ours.values()])
        same_tensors(list(theirs.values()), list(ours.values()))
        for optimizer in optimizers:
            optimizer.zero_grad()


def same_tensors(theirs: list[Any], ours: list[Any]) -> None:
    for q, p in zip(theirs, ours, strict=True):
        assert p.device_mesh == q.device_mesh
        assert p.placements == q.placements
        assert p.shape == q.shape and p.stride() == q.stride()
        assert torch.equal(p.to_local(), q.to_local())


# -- clipping ----------------------------------------------------------------------------------------------------------


@pytest.mark.extensive("each mesh", but=("2x2-*",))
@on_meshes(
    [
        (shape, plan, layout)
        for shape in ((2, 2), (1, 4))
        for plan, layout in (("blocks", "per_parameter"), ("sequence", "row"), ("tensor", "mixed"))
    ]
)
def test_norms_count_each_element_once(
    rank: int, world_size: int, shape: Shape, plan: str, layout: str
) -> None:
    """The parameters are on data-parallel ranks alone, on both axes, and replicated on one of them."""
    mesh = mesh_of(shape)
    plain = build()
    model = parallelize(copy.deepcopy(plain), mesh, plan)
    for number, block in enumerate(model.blocks):
        own = ("row", "per_parameter")[number] if layout == "mixed" else layout
        sw.fully_shard(block, mesh=data_mesh(mesh), layout=LAYOUTS[own])
    sw.fully_shard(model, mesh=data_mesh(mesh))
    for micro in range(data_mesh(mesh).size()):
        batch = tokens(0, 0, micro)
        (loss_of(plain(batch), batch) / data_mesh(mesh).size()).backward()
    batch = tokens(0, 0, data_rank(mesh))
    loss_of(model(batch), batch).backward()
    for order in (1.0, 2.0, 3.5, math.inf):
        before = [full(p.grad).clone() for p in model.parameters()]
        wanted = nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
        norm = sw.clip_grad_norm_(model.parameters(), float(wanted) / 2, order)
        assert norm.item() == pytest.approx(wanted.item(), rel=1e-5)
        for old, p in zip(before, model.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), old / 2)
            with torch.no_grad():
                p.grad.mul_(2)


@multirank(4)
def test_torchs_own_clipping_is_right_or_raises(rank: int, world_size: int) -> None:
    """The parameters are RaggedTensors on any meshes; DTensors on several are torch's to refuse."""
    mesh = mesh_of((2, 2))
    batch = tokens(0, 0, data_rank(mesh))
    for layout in ("row", "per_parameter"):
        model = shard(parallelize(build(), mesh, "blocks"), mesh, layout=LAYOUTS[layout])
        loss_of(model(batch), batch).backward()
        if layout == "per_parameter":
            with pytest.raises(RuntimeError, match="same mesh"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            continue
        before = [full(p.grad).clone() for p in model.parameters()]
        wanted = torch.stack([g.norm() for g in before]).norm()
        torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), float(wanted) / 2), wanted)
        for old, p in zip(before, model.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), old / 2)


# -- refusals ----------------------------------------------------------------------------------------------------------


@multirank(4)
def test_refusals_name_the_parameter_and_the_way_out(rank: int, world_size: int) -> None:
    mesh, other = mesh_of((2, 2)), world_mesh(2, 2, names=("x", "y"))
    unnamed = init_device_mesh("cpu", (4,))

    def linear(device_mesh: DeviceMesh = mesh["tp"], *placements: Any) -> nn.Linear:
        layer = nn.Linear(4, 4, bias=False)
        value = torch.randn(4, 4)
        local = DTensor.from_local(value, device_mesh, placements or (Shard(0),), run_check=False)
        layer.weight = nn.Parameter(local)
        return layer

    def refused(error: type[Exception], match: str, module: nn.Module, **options: Any) -> None:
        with pytest.raises(error, match=match):
            sw.fully_shard(module, **{"mesh": mesh["dp"], **options})
        assert not isinstance(module, sw.FSDPModule)

    partial = r"'weight'.*expected Shard or Replicate"
    refused(NotImplementedError, partial, linear(mesh["tp"], Partial()))
    refused(NotImplementedError, r"'weight'.*cannot be sharded over.*mesh_dim_names", linear(), mesh=unnamed)
    refused(
        NotImplementedError,
        r"'weight'.*cannot be sharded over.*Make both meshes named parts of one mesh",
        linear(other["x"]),
        mesh=mesh["dp"],
    )
    dims = sw.DataParallelMeshDims(shard="dp")
    refused(
        ValueError,
        r"'weight'.*is a Parameter.*must already be a DTensor",
        nn.Linear(2, 2),
        mesh=mesh,
        dp_mesh_dims=dims,
    )
    refused(ValueError, r"'weight'.*is expected on the mesh", linear(), mesh=mesh, dp_mesh_dims=dims)
    cut = linear(mesh, Shard(0), Shard(1))
    refused(ValueError, r"'weight'.*expected Replicate", cut, mesh=mesh, dp_mesh_dims=dims)
    unknown = sw.DataParallelMeshDims(shard="fsdp")
    refused(ValueError, "dp_mesh_dims names .*fsdp", linear(), mesh=mesh, dp_mesh_dims=unknown)
    refused(ValueError, "must be a DataParallelMeshDims", linear(), mesh=mesh, dp_mesh_dims="dp")
    deep = world_mesh(2, 2, names=("replicate", "shard"))
    fn = lambda p: sw.ShardPlacementResult(None, deep)  # noqa: E731
    refused(
        ValueError,
        "strategy 'zero3' is for",
        nn.Linear(2, 2),
        mesh=unnamed,
        strategy="zero3",
        shard_placement_fn=fn,
    )

    model = sw.fully_shard(linear(), mesh=mesh["dp"])
    for optimizer, match in (
        (torch.optim.Muon(model.parameters()), r"No rank can step parameter 'weight.* whole"),
        (sw.AdamW8bit(model.parameters(), min_size=1), "weight.*Tensor parallelism has cut the parameter"),
    ):
        with pytest.raises(ValueError, match=match):
            sw.fully_shard_optimizer(optimizer)
    # A block that only half of the ranks with data of their own reduce.
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sw.fully_shard(model[0], mesh=other["y"])
    sw.fully_shard(model, mesh=unnamed)
    with pytest.raises(ValueError, match=r"'weight'.*gradients of the other ranks would not reach"):
        model(torch.ones(1, 2))


@multirank(2)
def test_optimizers_built_before_sharding_are_noticed(rank: int, world_size: int) -> None:
    mesh = mesh_of((1, 2))
    model = parallelize(build(), mesh, "tensor")
    early, late = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    shard(model, mesh, layout="ragged")  # no DTensor can become a ragged tensor; plain parameters can
    batch = tokens(0, 0, 0)
    loss_of(model(batch), batch).backward()
    with pytest.raises(RuntimeError, match=r"was used through its old object, from before fully_shard"):
        early.step()
    before = full(model.head.weight).clone()
    sw.fully_shard_optimizer(late).step()
    assert not torch.equal(full(model.head.weight), before)
    model = parallelize(build(), mesh, "tensor")
    early, those = torch.optim.SGD(model.parameters(), lr=0.1), list(model.parameters())
    shard(model, mesh)
    assert all(p is q for p, q in zip(model.parameters(), those, strict=True))
    before = full(model.head.weight).clone()
    loss_of(model(batch), batch).backward()
    early.step()
    assert not torch.equal(full(model.head.weight), before)
