"""Odd shapes, ties, edits, conversions and initialisation of models with tensor parallelism."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.engine import RaggedTensor
from tests.engine.kit.models import Model, build, full, loss_of
from tests.engine.kit.tensor_parallel import (
    LAYOUTS,
    Shape,
    close,
    data_mesh,
    data_rank,
    mesh_of,
    parallelize,
    shard,
    tokens,
)
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank

ODD_SHAPES: list[tuple[Shape, Placement]] = [
    ((1, 3), Shard(0)),
    ((5,), Shard(0)),
    ((3, 1, 2), Shard(1)),
    ((3, 5), Shard(1)),
    ((7, 2), Shard(0)),
    ((9,), Replicate()),
    ((), Replicate()),
    ((2, 0), Shard(0)),
]


class Odd(nn.Module):
    """Parameters of shapes that neither axis divides, of which some ranks have no element."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for number, (shape, placement) in enumerate(ODD_SHAPES):
            value: Any = torch.randn(shape, generator=generator)
            if mesh is not None:
                value = distribute_tensor(value, mesh, [placement])
            self.register_parameter(f"p{number}", nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum() * 0
        for p in self.parameters():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            total = total + (whole.square() * x.sum()).sum()
        return total


@pytest.mark.extensive("each layout on each mesh", but=("(2, 2)-per_parameter-*", "(1, 4)-element-*"))
@multirank(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)], ids=str)
def test_uneven_and_empty_parts(
    rank: int, world_size: int, shape: Shape, layout: str, tmp_path: Path
) -> None:
    mesh = mesh_of(shape)
    plain = Odd(None)
    model = sw.fully_shard(Odd(mesh["tp"]), mesh=mesh["dp"], layout=LAYOUTS[layout])
    size = mesh["dp"].size()
    inputs = [torch.full((2,), 1.0 + d) for d in range(size)]
    for x in inputs:
        (plain(x) / size).backward()
    model(inputs[mesh.get_local_rank("dp")]).backward()
    optimizer = sw.fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    expected = torch.optim.Adam(plain.parameters(), lr=0.1)
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert p.numel() == q[1].numel() and (isinstance(p, RaggedTensor) == (layout != "per_parameter"))
        close(p.grad, q[1].grad, 1e-6, name)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.testing.assert_close(sw.clip_grad_norm_(model.parameters(), 1.0), norm)
    optimizer.step()
    expected.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(p, q, 1e-6, name)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    loaded = {name: torch.zeros_like(q) for name, q in plain.state_dict().items()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    for name, q in plain.state_dict().items():
        torch.testing.assert_close(loaded[name], q)


@multirank(2, 4)
def test_tied_and_frozen_parameters(rank: int, world_size: int) -> None:
    mesh = mesh_of((world_size // 2, 2))
    plain = build()
    model = parallelize(copy.deepcopy(plain), mesh, "tensor")
    for m in (plain, model):
        m.head.weight = m.embed.weight  # both are cut along the vocabulary
        m.blocks[0].up.requires_grad_(False)
        m.blocks[1].norm.requires_grad_(False)
    shard(model, mesh)
    assert model.head.weight is model.embed.weight
    size = data_mesh(mesh).size()
    for d in range(size):
        (loss_of(plain(tokens(0, 0, d)), tokens(0, 0, d)) / size).backward()
    batch = tokens(0, 0, data_rank(mesh))
    loss_of(model(batch), batch).backward()
    for (name, p), (other, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other and (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            close(p.grad, q.grad, 1e-5, name)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
def test_weights_that_change_after_forward_refuse_their_backward(
    rank: int, world_size: int, layout: str
) -> None:
    mesh = mesh_of((1, 2))
    model = shard(parallelize(build(), mesh, "tensor"), mesh, layout=LAYOUTS[layout])
    batch = tokens(0, 0, 0)
    loss = loss_of(model(batch), batch)
    with torch.no_grad():
        for p in model.blocks[0].parameters():
            p.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.reset_iter_state()
    plain = build()
    with torch.no_grad():
        for p in plain.blocks[0].parameters():
            p.mul_(1.5)
    assert torch.allclose(model(batch), plain(batch), atol=1e-5)


@multirank(4)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(rank: int, world_size: int, reentrant: bool) -> None:
    mesh = mesh_of((2, 2))
    plain = build()
    model = parallelize(copy.deepcopy(plain), mesh, "sequence")
    for block in model.blocks:
        inner = block.forward
        block.forward = functools.partial(checkpoint, inner, use_reentrant=reentrant)
    shard(model, mesh, layout="ragged")
    for d in range(2):
        (loss_of(plain(tokens(0, 0, d)), tokens(0, 0, d)) / 2).backward()
    batch = tokens(0, 0, data_rank(mesh))
    loss_of(model(batch), batch).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad, 1e-5, name)


class Handing(nn.Module):
    """Returns its own weight beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.linear.weight.view_as(self.linear.weight)


@multirank(2)
def test_weights_in_outputs_are_copies(rank: int, world_size: int) -> None:
    mesh = mesh_of((1, 2))
    model = Handing()
    wanted = model.linear.weight.detach().clone()
    parallelize_module(model, mesh["tp"], {"linear": ColwiseParallel()})
    wanted = full(model.linear.weight).detach().clone()
    sw.fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
    _, weight = model(torch.ones(1, 4))
    assert isinstance(weight, DTensor)
    assert torch.equal(weight.full_tensor(), wanted)


@multirank(4)
def test_ranks_that_start_differently_are_found(rank: int, world_size: int) -> None:
    """Between data-parallel ranks, of which each has its tensor-parallel part."""
    mesh = mesh_of((2, 2))

    def make() -> Model:
        model = parallelize(build(), mesh, "tensor")
        with torch.no_grad():
            model.blocks[1].up.weight.to_local().add_(mesh.get_local_rank("dp"))
        return model

    with pytest.raises(ValueError, match=r"start with different values.*'up.weight' on rank"):
        shard(make(), mesh, check_module_states=True)
    model = shard(make(), mesh, sync_module_states=True)
    for (name, p), q in zip(model.named_parameters(), build().parameters(), strict=True):
        assert torch.equal(full(p), q), name


class Doubling(nn.Module):
    """Doubles its weight in every forward, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight: Any = self.linear.weight
            target = weight.to_local() if self.how == "local" and isinstance(weight, DTensor) else weight
            (target.data if self.how == "data" else target).mul_(2)
        return self.linear(x)


@multirank(4)
@pytest.mark.parametrize("how", ["whole", "local", "data"])
def test_edits_of_full_weights_are_kept(rank: int, world_size: int, how: str) -> None:
    mesh = mesh_of((2, 2))
    torch.manual_seed(0)
    plain = Doubling(how)
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], {"linear": ColwiseParallel(output_layouts=Replicate())})
    sw.fully_shard(model, mesh=mesh["dp"], layout="ragged")
    x = torch.ones(2, 4)
    for _ in range(2):
        assert torch.allclose(model(x), plain(x))
    assert torch.equal(full(model.linear.weight), plain.linear.weight)


@multirank(4)
def test_conversions_copies_and_data(rank: int, world_size: int) -> None:
    mesh = mesh_of((2, 2))
    plain = build()
    model = shard(parallelize(copy.deepcopy(plain), mesh, "tensor"), mesh, layout="ragged")
    batch = tokens(0, 0, data_rank(mesh))
    twin = copy.deepcopy(model)
    assert torch.allclose(twin(batch), plain(batch), atol=1e-5)
    model.to(torch.float64)
    plain.to(torch.float64)
    assert torch.allclose(model(batch), plain(batch))
    new = torch.randn(
        plain.head.weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    model.head.weight.data = plain.head.weight.data = new
    assert torch.allclose(model(batch), plain(batch))
    assert torch.equal(full(model.head.weight), new)
    with pytest.raises(ValueError, match=r"weight.*was set to a plain tensor"):
        model.head.weight.data = new[:3]


@multirank(4)
def test_random_initialisation_draws_the_whole(rank: int, world_size: int) -> None:
    if not subclasses_dispatch:
        pytest.skip("this torch does not ask our parameters")
    mesh = mesh_of((2, 2))
    plain = build()
    model = shard(parallelize(copy.deepcopy(plain), mesh, "tensor"), mesh)
    for m in (plain, model):
        torch.manual_seed(7)
        nn.init.normal_(m.embed.weight)
        nn.init.uniform_(m.blocks[0].down.weight)
    assert torch.equal(full(model.embed.weight), plain.embed.weight)
    assert torch.equal(full(model.blocks[0].down.weight), plain.blocks[0].down.weight)


@multirank(4)
@pytest.mark.parametrize("layout", ["per_parameter", "row"])
@pytest.mark.parametrize("how", ["meta", "deferred"])
def test_materialised_models_equal_those_built_at_once(
    rank: int, world_size: int, how: str, layout: str
) -> None:
    mesh = mesh_of((2, 2))
    plain = build(3)
    torch.manual_seed(3)
    with torch.device("meta") if how == "meta" else sw.deferred_init():
        model = Model()
    model = shard(parallelize(model, mesh, "sequence", None), mesh, layout=LAYOUTS[layout])
    sw.materialize(model)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(p), q), name


@multirank(2)
def test_deferred_tensors_are_not_communicated(rank: int, world_size: int) -> None:
    mesh = mesh_of((1, 2))
    with sw.deferred_init():
        model = Model()
    with pytest.raises(RuntimeError, match="src_data_rank=None"):
        parallelize(model, mesh, "tensor")
    with sw.deferred_init():
        model = Model()
    parallelize(model, mesh, "tensor", None)
    with pytest.raises(
        ValueError, match=r"'weight' of Embedding, a DTensor .* belongs to no unit of fully_shard"
    ):
        sw.materialize(model)
