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
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright._torch import subclasses_dispatch
from shardwright.engine.ragged import RaggedTensor
from tests.engine.kit.models import Model, Reference, build, full, loss_of
from tests.engine.kit.tensor_parallel import Shape, data_mesh, data_rank, mesh_of, parallelize, tokens
from tests.support import CaseFailed, WorkerPools, multirank, world_mesh
from tests.support.matrix import select, together

BF16, FP32 = torch.bfloat16, torch.float32
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


def close(found: Any, wanted: Any, tolerance: float, name: str) -> None:
    assert found is not None, name
    assert found.shape == wanted.shape, name
    torch.testing.assert_close(
        full(found), wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}"
    )


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


# -- checkpoints -------------------------------------------------------------------------------------------------------


def trained(model: Model, mesh: DeviceMesh, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """After one step, so that there is optimizer state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if isinstance(model, sw.FSDPModule):
        optimizer = sw.fully_shard_optimizer(optimizer)
    batch = tokens(seed, 0, data_rank(mesh))
    loss_of(model(batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def whole_states(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter and every state of it, whole, by name."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = full(p).detach()
        for key, value in optimizer.state[p].items():
            found[f"{name}/{key}"] = full(value)
    return found


#: From torch's FSDP2 or ours, on a mesh and in a layout, to another.
_MOVES = [
    (("fsdp2", (2, 2), None), ("sw", (1, 4), "per_parameter")),
    (("fsdp2", (2, 2), None), ("sw", (2, 1, 2), "element")),
    (("sw", (2, 2), "per_parameter"), ("fsdp2", (4, 1), None)),
    (("sw", (1, 4), "row"), ("fsdp2", (2, 1, 2), None)),
    (("sw", (2, 2), "element"), ("sw", (4, 1), "row")),
    (("sw", (4, 1), "row"), ("sw", (1, 2, 2), "per_parameter")),
]


@multirank(4)
@pytest.mark.parametrize(("one", "other"), _MOVES, ids=lambda m: "-".join(map(str, m)))
def test_checkpoints_move(rank: int, world_size: int, one: Any, other: Any, tmp_path: Path) -> None:
    """Model and optimizer, by torch.distributed.checkpoint."""

    def make(kind: str, shape: Shape, layout: str | None, seed: int) -> tuple[Model, torch.optim.Optimizer]:
        mesh = mesh_of(shape)
        model = parallelize(build(seed), mesh, "sequence")
        if kind == "fsdp2":
            return trained(shard(model, mesh, fsdp2), mesh, seed)
        return trained(shard(model, mesh, layout=LAYOUTS[str(layout)]), mesh, seed)

    source, target = make(*one, seed=1), make(*other, seed=2)
    wanted = whole_states(*source)
    weights, state = get_state_dict(*source)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    weights, state = get_state_dict(*target)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    set_state_dict(*target, model_state_dict=weights, optim_state_dict=state)
    found = whole_states(*target)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@multirank(4)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)], ids=str)
def test_whole_state_dicts(rank: int, world_size: int, shape: Shape, layout: str) -> None:
    mesh = mesh_of(shape)
    plain = build(3)
    wanted = plain.state_dict()
    model = shard(parallelize(build(3), mesh, "tensor"), mesh, layout=LAYOUTS[layout])
    options = StateDictOptions(full_state_dict=True)
    gathered = get_model_state_dict(model, options=options)
    assert all(torch.equal(gathered[name], value) for name, value in wanted.items())
    other = build(4).state_dict()
    model.load_state_dict(other)  # whole tensors
    assert all(torch.equal(full(value), other[name]) for name, value in model.state_dict().items())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(wanted) if rank == 0 else {}, options=options)
    assert all(torch.equal(full(value), wanted[name]) for name, value in model.state_dict().items())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    batch = tokens(0, 0, data_rank(mesh))
    assert torch.allclose(model(batch), plain(batch), atol=1e-5)


@multirank(4)
def test_pretrained_files(rank: int, world_size: int, tmp_path: Path) -> None:
    mesh = mesh_of((2, 2))
    model = shard(parallelize(build(5), mesh, "sequence"), mesh, layout="ragged")
    sw.save_pretrained(model, tmp_path / "one")
    other = shard(parallelize(build(6), mesh, "tensor"), mesh)
    sw.load_pretrained(other, tmp_path / "one")
    for (name, p), q in zip(other.named_parameters(), build(5).parameters(), strict=True):
        assert torch.equal(full(p), q), name


# -- clipping ----------------------------------------------------------------------------------------------------------


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
    """Of parameters on data-parallel ranks alone, on both axes, and replicated on one of them."""
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
    """Of RaggedTensors on whatever meshes; DTensors on several are torch's to refuse."""
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


# -- shapes, ties, edits -----------------------------------------------------------------------------------------------

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

    with pytest.raises(ValueError, match=r"do not start from the same.*'up.weight' on rank"):
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
    with pytest.raises(ValueError, match=r"'weight' of Embedding, a DTensor .* no unit of fully_shard owns"):
        sw.materialize(model)


# -- the whole mesh and its data-parallel dimensions; expert parallelism -----------------------------------------------

DIMS = {
    "shard": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "inside": ((2, 2), ("tp", "dp"), {"shard": "dp"}),
    "replicas": ((2, 2), ("dp", "tp"), {"replicate": "dp"}),
    "both": ((2, 1, 2), ("replicate", "dp", "tp"), {"shard": "dp", "replicate": "replicate"}),
    "several": ((2, 2, 1), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
}


class Spmd(nn.Module):
    """Two matrices that are DTensors on the whole mesh, and a norm that is replicated on it."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        generator = torch.Generator().manual_seed(1)
        names = mesh.mesh_dim_names if mesh is not None else None
        for name, shape, placement in (
            ("up", (6, 5), Shard(0)),
            ("down", (5, 6), Shard(1)),
            ("scale", (5,), Replicate()),
        ):
            value: Any = torch.randn(shape, generator=generator)
            if mesh is not None and names is not None:
                value = distribute_tensor(
                    value, mesh, [placement if n == "tp" else Replicate() for n in names]
                )
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: Any = x
        if self.mesh is not None and isinstance(self.up, DTensor):
            assert self.up.device_mesh == self.mesh
            # Every rank's own data, said to be the same everywhere, as FSDP's users do.
            h = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        out = torch.relu((h * self.scale) @ self.up.T) @ self.down.T
        return out.full_tensor() if isinstance(out, DTensor) else out


@multirank(4)
@pytest.mark.parametrize(
    ("dims", "layout"), [*((dims, "per_parameter") for dims in DIMS), ("both", "element"), ("several", "row")]
)
def test_named_data_parallel_dimensions(
    rank: int, world_size: int, dims: str, layout: str, tmp_path: Path
) -> None:
    shape, names, given = DIMS[dims]
    mesh = world_mesh(*shape, names=names)
    options = {"mesh": mesh, "dp_mesh_dims": sw.DataParallelMeshDims(**given)}  # type: ignore[arg-type]
    plain, model = Spmd(None), sw.fully_shard(Spmd(mesh), layout=LAYOUTS[layout], **options)
    data = [axis for axis, name in enumerate(names) if name != "tp"]
    here = functools.reduce(lambda n, axis: n * shape[axis] + mesh.get_local_rank(axis), data, 0)
    size = math.prod(shape[axis] for axis in data)
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        inputs = [
            torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + d)) for d in range(size)
        ]
        for x in inputs:
            (plain(x).square().mean() / size).backward()
        model(inputs[here]).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(p.grad, q.grad, 1e-5, name)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(sw.clip_grad_norm_(model.parameters(), 0.5), wanted)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(p, q, 1e-5, name)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    loaded = {name: torch.zeros_like(q) for name, q in plain.state_dict().items()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    for name, q in plain.state_dict().items():
        torch.testing.assert_close(loaded[name], q)
    if layout == "per_parameter" and sw.DataParallelMeshDims.__module__.startswith("torch."):
        theirs = fsdp2(Spmd(mesh), **options)
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            assert p.placements == q.placements and p.device_mesh == q.device_mesh
            assert p.to_local().shape == q.to_local().shape


class Experts(nn.Module):
    """Experts in two tensors; with expert parallelism each rank of a group has some, and tokens travel to them."""

    def __init__(self, experts: int = 4, dim: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) / 2)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) / 2)

    def forward(self, x_ED: torch.Tensor) -> torch.Tensor:
        """One row for each expert; with expert parallelism the same of every rank of the group, for this one's."""
        mesh = self.up.device_mesh if isinstance(self.up, DTensor) else None
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        if mesh is not None:  # (experts, dim) of each rank to (own experts, ranks, dim)
            x_ED = Exchange.apply(x_ED, mesh["ep"].get_group())
            if mesh.ndim > 1:
                x_ED = Copies.apply(x_ED, mesh["tp"].get_group())
        x = x_ED.view(-1, up.shape[0], x_ED.shape[-1]).transpose(0, 1)
        out = torch.relu(x @ up) @ down
        if mesh is not None and mesh.ndim > 1:
            out = Sum.apply(out, mesh["tp"].get_group())
        y_ED = out.transpose(0, 1).reshape(-1, x_ED.shape[-1])
        return Exchange.apply(y_ED, mesh["ep"].get_group()) if mesh is not None else y_ED


class Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, a share for each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(result, x.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return Exchange.apply(g, ctx.group), None


class Sum(torch.autograd.Function):
    """Of the parts that the ranks of a group have computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        result = x.clone()
        torch.distributed.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g, None


class Copies(torch.autograd.Function):
    """The same on all ranks of a group, which each compute a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return Sum.apply(g, ctx.group), None


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.experts = Experts()
        self.outer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.experts(self.inner(x)))


@multirank(4)
@pytest.mark.parametrize(
    ("experts", "how", "layout"),
    [(2, "unit", "row"), (4, "unit", "per_parameter"), (2, "result", "per_parameter"), (2, "result", "row")],
)
def test_expert_parallelism(
    rank: int, world_size: int, experts: int, how: str, layout: str, tmp_path: Path
) -> None:
    """Experts over their own meshes: parts of them by expert parallelism, then over the ranks that have the same."""
    sizes = world_size // experts, experts
    mesh = world_mesh(*sizes, names=("edp", "ep"))
    whole = world_mesh(world_size, names=("dp",))
    torch.manual_seed(0)
    plain = MoE()
    model = copy.deepcopy(plain)
    for name, p in list(model.experts.named_parameters()):
        setattr(model.experts, name, nn.Parameter(distribute_tensor(p.detach(), mesh["ep"], [Shard(0)])))
    if how == "unit":
        sw.fully_shard(model.experts, mesh=mesh["edp"], layout=LAYOUTS[layout])
        # Tokens of all ranks of its group reach an expert: their gradients are summed there already.
        model.experts.set_gradient_divide_factor(world_size)
        sw.fully_shard(model, mesh=whole, layout=LAYOUTS[layout])
    else:
        of_experts = set(model.experts.parameters())
        sw.fully_shard(
            model,
            mesh=whole,
            layout=LAYOUTS[layout],
            shard_placement_fn=lambda p: (
                sw.ShardPlacementResult(None, mesh["edp"]) if p in of_experts else None
            ),
        )
        # As for a loss that is divided by the tokens of all ranks.
        model.set_gradient_divide_factor(1.0)
    if how == "result":
        copied = copy.deepcopy(model)
        assert torch.allclose(copied(torch.ones(4, 5)), plain(torch.ones(4, 5)), atol=1e-6)
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        inputs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(4)]
        for x in inputs:
            (plain(x).square().mean() / world_size).backward()
        (model(inputs[rank]).square().mean() / (world_size if how == "result" else 1)).backward()
        check_step(model, plain, optimizer, expected)
    check_saved(model, plain, tmp_path)


def check_step(model: nn.Module, plain: nn.Module, optimizer: Any, expected: Any) -> None:
    """Gradients, their norm, and the step that both models make."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad, 1e-5, name)
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(sw.clip_grad_norm_(model.parameters(), 0.5), wanted)
    for each in (optimizer, expected):
        each.step()
        each.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(p, q, 1e-5, name)


def check_saved(model: nn.Module, plain: nn.Module, path: Path) -> None:
    """A plain model reads what was saved of a sharded one."""
    dcp.save(model.state_dict(), checkpoint_id=path)
    loaded = {name: torch.zeros_like(q) for name, q in plain.state_dict().items()}
    dcp.load(loaded, checkpoint_id=path)
    for name, q in plain.state_dict().items():
        torch.testing.assert_close(loaded[name], q)


@multirank(4)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
def test_expert_with_tensor_parallelism(rank: int, world_size: int, layout: str, tmp_path: Path) -> None:
    """Experts on two other axes, one of which is data-parallel for all else."""
    mesh = world_mesh(1, 2, 2, names=("edp", "ep", "tp"))
    torch.manual_seed(0)
    plain = MoE()
    model = copy.deepcopy(plain)
    for name, placements in (("up", [Shard(0), Shard(2)]), ("down", [Shard(0), Shard(1)])):
        p = distribute_tensor(getattr(model.experts, name).detach(), mesh["ep", "tp"], placements)
        setattr(model.experts, name, nn.Parameter(p))
    sw.fully_shard(model.experts, mesh=mesh["edp"], layout=LAYOUTS[layout])
    model.experts.set_gradient_divide_factor(2)
    sw.fully_shard(model, mesh=mesh["ep"], layout=LAYOUTS[layout])
    optimizer = sw.fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    expected = torch.optim.Adam(plain.parameters(), lr=0.1)
    for step in range(2):
        inputs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + d)) for d in range(2)]
        for x in inputs:
            (plain(x).square().mean() / 2).backward()
        model(inputs[mesh.get_local_rank("ep")]).square().mean().backward()
        check_step(model, plain, optimizer, expected)
    check_saved(model, plain, tmp_path)


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
        r"'weight'.*cannot be sharded over.*Take both meshes from one",
        linear(other["x"]),
        mesh=mesh["dp"],
    )
    dims = sw.DataParallelMeshDims(shard="dp")
    refused(
        ValueError,
        r"'weight'.*is a Parameter.*must be a DTensor",
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
    fn = lambda p: sw.ShardPlacementResult(None, mesh["tp"])  # noqa: E731
    refused(
        ValueError,
        "Give one of both",
        linear(mesh, Replicate(), Shard(0)),
        mesh=mesh,
        dp_mesh_dims=dims,
        shard_placement_fn=fn,
    )
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
        (torch.optim.Muon(model.parameters()), "'weight.*cannot be stepped whole"),
        (sw.AdamW8bit(model.parameters(), min_size=1), "weight.*tensor parallelism has cut it"),
    ):
        with pytest.raises(ValueError, match=match):
            sw.fully_shard_optimizer(optimizer)
    # A block that only half of the ranks with data of their own reduce.
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sw.fully_shard(model[0], mesh=other["y"])
    sw.fully_shard(model, mesh=unnamed)
    with pytest.raises(ValueError, match=r"'weight'.*other ranks' gradients would not reach it"):
        model(torch.ones(1, 2))


@multirank(2)
def test_optimizers_built_before_sharding_are_noticed(rank: int, world_size: int) -> None:
    mesh = mesh_of((1, 2))
    model = parallelize(build(), mesh, "tensor")
    early, late = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    shard(model, mesh, layout="ragged")
    batch = tokens(0, 0, 0)
    loss_of(model(batch), batch).backward()
    with pytest.raises(RuntimeError, match="as it was before the model was sharded"):
        early.step()
    before = full(model.head.weight).clone()
    sw.fully_shard_optimizer(late).step()
    assert not torch.equal(full(model.head.weight), before)
