"""The ragged tensor against plain tensors: optimizers, norms, copies, checkpoints, and what it refuses."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
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
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwright as sw
from shardwright.engine import RaggedDTensor, RaggedSpec, RaggedTensor
from shardwright.engine.tensors.ragged.spec import boxes_of
from shardwright.optim.needs import NEEDS_OF_CLASSES
from tests.support import multirank, world_mesh


def spec(mesh: DeviceMesh, shape: tuple[int, ...], offset: int, unit: int = 1, slack: int = 0) -> RaggedSpec:
    """In a segment that is just long enough, or ``slack`` elements per rank longer; cut in multiples of ``unit``."""
    size = mesh.size(mesh.ndim - 1)
    chunk = -(-(offset + math.prod(shape)) // (size * unit)) * unit + slack
    return RaggedSpec(torch.Size(shape), offset, chunk, mesh, unit)


def specs(mesh: DeviceMesh) -> list[RaggedSpec]:
    """Whole rows; cut rows; four dimensions; nothing on some ranks."""
    return [
        spec(mesh, (7, 4), 4, unit=4),
        spec(mesh, (5, 3), 2),
        spec(mesh, (3, 2, 2, 3), 1),
        spec(mesh, (3,), 0, slack=8),
    ]


def others(mesh: DeviceMesh) -> list[RaggedSpec]:
    """The same shapes, cut elsewhere."""
    return [
        spec(mesh, (7, 4), 3),
        spec(mesh, (5, 3), 6, unit=3),
        spec(mesh, (3, 2, 2, 3), 0, slack=2),
        spec(mesh, (3,), 5),
    ]


def values(shapes: Any, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator) for s in shapes]


def shapes(some: list[RaggedSpec]) -> list[torch.Size]:
    return [s.shape for s in some]


def ragged(full: list[torch.Tensor], cuts: list[RaggedSpec]) -> list[RaggedTensor]:
    return [RaggedTensor.from_full(t, s) for t, s in zip(full, cuts, strict=True)]


def same(found: Any, expected: Any, tol: float = 0.0) -> None:
    for f, e in zip(found, expected, strict=True):
        whole = f.full_tensor() if isinstance(f, (RaggedTensor, DTensor)) else f
        assert type(whole) in (torch.Tensor, nn.Parameter)
        torch.testing.assert_close(whole.detach(), e.detach(), rtol=tol, atol=tol / 10)


# -- the pure part -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 3, 4), (3, 1, 2, 2)])
def test_every_range_is_a_few_rectangles_in_memory_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(numbers.numel() + 1), 2):
        boxes = boxes_of(shape, start, stop)
        assert len(boxes) <= 2 * len(shape) - 1
        found = [
            numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in boxes
        ]
        assert torch.equal(torch.cat([numbers.new_empty(0), *found]), torch.arange(start, stop))


@multirank(3)
def test_specs_check_themselves(rank: int, world_size: int) -> None:
    mesh = world_mesh(3)
    rows = RaggedSpec(torch.Size((5, 4)), 4, 8, mesh, granule=4)
    assert rows.ranges == [(0, 4), (4, 12), (12, 20)]
    assert [rows.local_shape(r) for r in range(3)] == [(1, 4), (2, 4), (2, 4)]
    cut = RaggedSpec(torch.Size((5, 4)), 2, 8, mesh)
    assert cut.ranges == [(0, 6), (6, 14), (14, 20)] and cut.local_shape(0) == (6,)
    whole = RaggedSpec(torch.Size((2, 4)), 9, 17, mesh, granule=8)  # in one chunk, so no rank cuts a row
    assert whole.ranges == [(0, 8), (8, 8), (8, 8)] and whole.local_shape(1) == (0, 4)
    for bad in [((5, 4), 2, 8, 4), ((5, 4), 0, 6, 1), ((), 0, 1, 1), ((2,), -1, 1, 1)]:
        with pytest.raises(ValueError):
            RaggedSpec(torch.Size(bad[0]), bad[1], bad[2], mesh, bad[3])


# -- values in and out -------------------------------------------------------------------------------------------------


@multirank(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_redistribution(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Between whole, ragged, otherwise ragged, Replicate and Shard(0): always the same values."""
    mesh = world_mesh(world_size)
    full = [(8 * v).to(dtype) for v in values(shapes(specs(mesh)))]
    bytewise = dtype == torch.float8_e4m3fn  # which nothing compares, and DTensor does not gather on gloo

    def check(found: list[Any], expected: list[torch.Tensor]) -> None:
        if bytewise:
            found = [t.full_tensor().float() for t in found if isinstance(t, RaggedTensor)]
            expected = [t.float() for t in expected][: len(found)]
        same(found, expected)

    one = ragged(full, specs(mesh))
    check(one, full)
    assert [t.to_local().shape for t in one] == [s.local_shape(rank) for s in specs(mesh)]
    other = ragged(one, others(mesh))
    check(other, full)
    check(ragged(other, specs(mesh)), full)
    for placement in (Replicate(), Shard(0)):
        moved = [t.redistribute(placements=[placement]) for t in one]
        for m, f in zip(moved, full, strict=True):
            expected = distribute_tensor(f.view(torch.uint8) if dtype.itemsize == 1 else f, mesh, [placement])
            assert m.placements == expected.placements and m.to_local().shape == expected.to_local().shape
        check(moved, full)
        check(ragged(moved, others(mesh)), full)


@multirank(2)
def test_copies_from_everywhere(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    full = values(shapes(specs(mesh)), 1)
    sources: list[list[Any]] = [
        full,
        [t.t().contiguous().t() if t.dim() == 2 else t for t in full],
        ragged(full, specs(mesh)),
        ragged(full, others(mesh)),
        [distribute_tensor(t, mesh, [Shard(0)]) for t in full],
        [distribute_tensor(t, mesh, [Shard(t.dim() - 1)]) for t in full],
        [distribute_tensor(t, mesh, [Replicate()]) for t in full],
        [t.as_dtensor() for t in ragged(full, others(mesh))],
        [t.double() for t in full],
    ]
    for source in sources:
        target = ragged([torch.zeros_like(t) for t in full], specs(mesh))
        assert all(t.copy_(s) is t for t, s in zip(target, source, strict=True))
        same(target, full)
    target[0].copy_(torch.arange(4.0))
    same(target[:1], [torch.arange(4.0).expand(7, 4)])
    with pytest.raises(RuntimeError):
        target[0].copy_(torch.zeros(3))


@multirank(4)
def test_the_last_mesh_dimension_shards_and_the_others_replicate(rank: int, world_size: int) -> None:
    mesh = world_mesh(2, 2)
    full = values(shapes(specs(mesh)))
    one = ragged(full, specs(mesh))
    same(one, full)
    same([t.redistribute(placements=[Replicate(), Shard(0)]) for t in one], full)
    same([torch.linalg.vector_norm(t) for t in one], [torch.linalg.vector_norm(t) for t in full], 1e-6)


# -- arithmetic --------------------------------------------------------------------------------------------------------


@multirank(1, 3)
def test_reductions_are_over_all_ranks(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    full = values(shapes(specs(mesh)))
    parts = ragged(full, specs(mesh))
    for order in (2, 1, 0, 3.5, math.inf, -math.inf):
        same(
            [torch.linalg.vector_norm(t, order) for t in parts],
            [torch.linalg.vector_norm(t, order) for t in full],
            1e-5,
        )
        if order != -math.inf:
            same(
                torch._foreach_norm([*parts, full[0]], order),
                torch._foreach_norm([*full, full[0]], order),
                1e-5,
            )
    functions: list[Callable[[Any], torch.Tensor]] = [
        torch.sum, torch.mean, torch.max, torch.min, torch.amax, torch.amin, torch.norm,
        lambda t: t.sum(dim=tuple(range(t.dim()))),
        lambda t: (t > 1).any(), lambda t: (t > -9).all(), lambda t: (t > 0).sum(), lambda t: t.isfinite().all(),
        lambda t: (10 * t).long().max(), lambda t: t.to(torch.bfloat16).max(),
    ]  # fmt: skip
    for function in functions:
        same([function(t) for t in parts], [function(t) for t in full], 1e-5)
    assert torch.equal(parts[0], parts[0].clone()) and torch.allclose(parts[1], parts[1] + 1e-9)
    changed = full[1].clone()
    changed[-1, -1] = math.nan  # on the last rank
    broken = RaggedTensor.from_full(changed, parts[1].spec)
    assert not torch.equal(parts[1], broken)
    for function in (torch.sum, torch.max, torch.min, lambda t: torch.linalg.vector_norm(t, math.inf)):
        assert math.isnan(function(broken))


@multirank(2)
def test_elementwise_operations(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    full = values(shapes(specs(mesh)))
    parts = ragged(full, specs(mesh))
    scale = torch.tensor(0.3)
    functions: list[Callable[[Any], torch.Tensor]] = [
        lambda t: t * 2 + t / scale - 1, lambda t: torch.where(t > 0, t, 0.0), lambda t: t.abs().sqrt().exp(),
        lambda t: t.lerp(t * t, scale), lambda t: torch.addcdiv(t, t, t.abs() + 1, value=-0.5), lambda t: -t,
        lambda t: t.clamp(min=0).to(torch.bfloat16), lambda t: t.masked_fill(t < 0, 7.0), lambda t: t.double(),
        lambda t: torch.zeros_like(t).add_(1), lambda t: t.new_full(t.shape, 3.0), lambda t: 2 ** t,
        lambda t: torch.maximum(t, -t, out=torch.empty_like(t)), lambda t: t.contiguous().view_as(t),
        lambda t: t.float(), lambda t: torch.full_like(t, 4.0, dtype=torch.float64), lambda t: t.nan_to_num(),
    ]  # fmt: skip
    for function in functions:
        for inference in (False, True):
            with torch.inference_mode(inference):
                # Vector instructions and what remains of a range round differently: by one place.
                same([function(t) for t in parts], [function(t) for t in full], 3e-7)
    same(torch._foreach_pow(2.0, [*parts, full[0]]), torch._foreach_pow(2.0, [*full, full[0]]), 3e-7)
    same(
        torch._foreach_mul([*parts, full[0]], [scale] * 5), torch._foreach_mul([*full, full[0]], [scale] * 5)
    )
    masked = [p.clone() for p in parts]
    for t in masked:
        t[t.gt(0)] = 5.0
    same(masked, [t.masked_fill(t > 0, 5.0) for t in full])
    assert (
        type(parts[0].new_zeros(2)) is torch.Tensor
    )  # as row-wise statistics ask for: not cut like the tensor
    version = parts[0]._version
    parts[0].mul_(1)
    torch._foreach_add_(parts, 1)
    assert parts[0]._version == version + 2 == parts[0].detach()._version


@multirank(2)
def test_as_parameter(rank: int, world_size: int) -> None:
    full = values([(5, 3)])[0]
    p: Any = nn.Parameter(RaggedTensor.from_full(full, spec(world_mesh(world_size), (5, 3), 2)))
    assert isinstance(p, nn.Parameter) and isinstance(p, RaggedTensor) and p.requires_grad and p.is_leaf
    assert p.shape == (5, 3) and p.stride() == (3, 1) and p.detach().to_local() is p.to_local()
    with torch.inference_mode():
        assert not nn.Parameter(p).is_inference() and not p.as_dtensor().to_local().is_inference()
    p.grad = torch.ones_like(p)
    p.note = ["kept"]
    module = nn.Module()
    module.p, module.tied = p, p
    other: Any = copy.deepcopy(module).p
    assert (
        isinstance(other, nn.Parameter) and other.grad is None and other.note == ["kept"] != p.note.append(1)
    )
    assert other.spec is p.spec and other.to_local().data_ptr() != p.to_local().data_ptr()
    same([other], [full])
    start, stop = p.spec.range_of(rank)
    assert "shape=(5, 3)" in repr(p) and f"elements {start}:{stop} of 15 on rank {rank} of 2" in repr(p)
    torch.utils.swap_tensors(module.p, nn.Parameter(RaggedTensor.from_full(full + 1, p.spec)))
    same([module.p], [full + 1])
    module.p.data = RaggedTensor.from_full(full.double(), p.spec)
    assert module.p.dtype == torch.float64 and module.p.to_local().dtype == torch.float64
    module.to(torch.bfloat16)
    assert module.p.dtype == torch.bfloat16 and module.p.to_local().dtype == torch.bfloat16
    module.load_state_dict({"p": full, "tied": full})
    same([module.p], [full.bfloat16()])


@multirank(2)
def test_everything_else_is_refused_with_the_way_out(rank: int, world_size: int) -> None:
    cut, full = spec(world_mesh(world_size), (5, 5), 2), values([(5, 5)])[0]
    t: Any = RaggedTensor.from_full(full, cut)
    refused: list[Callable[[], Any]] = [
        lambda: t @ t, lambda: t[0], lambda: t.view(-1), lambda: t.t(), lambda: t.tolist(), lambda: t.numpy(),
        lambda: list(t), lambda: t.sum(0), lambda: t.max(0), lambda: t.norm(dim=1), lambda: t.argmax(),
        lambda: torch.stack([t, t]), lambda: torch.cat([t, t]), lambda: t + full, lambda: full + t,
        lambda: full.add_(t), lambda: full.copy_(t), lambda: torch.ones(()).add_(t), lambda: t.normal_(),
        lambda: torch.rand_like(t), lambda: nn.functional.linear(full, t), lambda: t.share_memory_(),
        lambda: t + RaggedTensor.from_full(full, spec(cut.mesh, (5, 5), 0)), lambda: t.cumsum(0), lambda: t.std(0),
        lambda: torch._foreach_add([full], [t]), lambda: torch._foreach_mul_([t, t], [full, full]),
        lambda: torch.save(t, io.BytesIO()), lambda: pickle.dumps(nn.Parameter(t)), lambda: copy.copy(t),
        lambda: torch.save({"p": t.as_dtensor()}, io.BytesIO()), lambda: t.as_dtensor()[0], lambda: t.softmax(-1),
        lambda: t.redistribute(placements=[Shard(1)]), lambda: setattr(t, "data", full),
        lambda: t.__setitem__(0, 1.0), lambda: t.unsqueeze(0),
        lambda: torch.add(t, 1, out=torch.empty(5, 5)), lambda: torch.optim.swa_utils.get_swa_avg_fn()(full, t, 1),
    ]  # fmt: skip
    for inference in (False, True):
        with torch.inference_mode(inference):
            for attempt in refused:
                with pytest.raises(NotImplementedError, match=r"full_tensor\(\)|redistribute|copy_"):
                    attempt()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        distribute_tensor(full, cut.mesh, [Shard(0)]).add_(t)
    same([t], [full])  # nothing was changed on the way


# -- optimizers and clipping -------------------------------------------------------------------------------------------

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
MODES = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
ELEMENTWISE = [kind for kind, need in NEEDS_OF_CLASSES.items() if need == 1]
STEPS = [(kind, mode) for kind in ELEMENTWISE for mode in MODES if mode != "fused" or kind in FUSED]


@multirank(1, 3)
@pytest.mark.parametrize("kind, mode", STEPS, ids=[f"{k.__name__}-{m}" for k, m in STEPS])
def test_torch_optimizers(rank: int, world_size: int, kind: Any, mode: str) -> None:
    """On ragged and plain parameters together; also a copy of the optimizer's state."""
    options: dict[str, Any] = dict(MODES[mode], lr=0.05)
    if kind is torch.optim.SGD:
        options |= {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        options |= {"amsgrad": True}
    mesh = world_mesh(world_size)
    full = values([*shapes(specs(mesh)), (2, 2)])
    plain = [nn.Parameter(t.clone()) for t in full]
    parts = [nn.Parameter(t) for t in [*ragged(full[:-1], specs(mesh)), full[-1].clone()]]
    expected, found = kind(plain, **options), kind(parts, **options)
    for step in range(3):
        for p, q, g in zip(parts, plain, values(shapes(full), step + 1), strict=True):
            q.grad = g
            p.grad = RaggedTensor.from_full(g, p.spec) if isinstance(p, RaggedTensor) else g.clone()
        expected.step()
        found.step()
        if step == 1:
            found.load_state_dict(copy.deepcopy(found.state_dict()))
    same(parts, plain, 1e-5)
    for p, q in zip(parts, plain, strict=True):
        for key, value in expected.state[q].items():
            if isinstance(value, torch.Tensor):
                assert isinstance(found.state[p][key], RaggedTensor) == (
                    isinstance(p, RaggedTensor) and value.dim() > 0
                )
                same([found.state[p][key]], [value], 1e-5)


@multirank(1, 3)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_clipping_by_torch(rank: int, world_size: int, foreach: bool, order: float) -> None:
    mesh = world_mesh(world_size)
    full = values(shapes(specs(mesh)))
    plain = [nn.Parameter(t.clone()) for t in full]
    parts = [nn.Parameter(t) for t in ragged(full, specs(mesh))]
    for p, q, s in zip(parts, plain, specs(mesh), strict=True):
        q.grad, p.grad = q.detach() * 3, RaggedTensor.from_full(q.detach() * 3, s)
    found = nn.utils.clip_grad_norm_(parts, 0.5, order, foreach=foreach)
    expected = nn.utils.clip_grad_norm_(plain, 0.5, order, foreach=foreach)
    same([found, *[p.grad for p in parts]], [expected, *[q.grad for q in plain]], 1e-5)
    nn.utils.clip_grad_value_(parts, 0.01, foreach=foreach)
    nn.utils.clip_grad_value_(plain, 0.01, foreach=foreach)
    same([p.grad for p in parts], [q.grad for q in plain], 1e-5)


@multirank(2)
@pytest.mark.parametrize("where", [None, 0, -1])
def test_grad_scaler_skips_on_every_rank(rank: int, world_size: int, where: int | None) -> None:
    mesh = world_mesh(world_size)
    full = values(shapes(specs(mesh)))
    parts = [nn.Parameter(t) for t in ragged(full, specs(mesh))]
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(parts, lr=1.0)
    scaler.scale(torch.ones(()))
    gradients = [torch.full_like(t, 8.0) for t in full]
    if where is not None:
        gradients[0].view(-1)[where] = math.inf  # on one rank only
    for p, g in zip(parts, gradients, strict=True):
        p.grad = RaggedTensor.from_full(g, p.spec)
    scaler.step(optimizer)
    scaler.update()
    same(parts, [t - 2.0 for t in full] if where is None else full, 1e-6)
    assert scaler.get_scale() == (4.0 if where is None else 2.0)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def state(tensors: Any) -> dict[str, Any]:
    return {f"t{i}": t for i, t in enumerate(tensors)}


@pytest.mark.extensive("each pair")
@multirank(3)
def test_checkpoints_between_layouts_and_world_sizes(rank: int, world_size: int, tmp_path: Path) -> None:
    """Saved by two ranks ragged, by three as Shard(0), and from plain tensors; loaded by one, two and three as each."""
    three, two, one = world_mesh(3), DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0])
    full = values(shapes(specs(three)))
    empty = [torch.zeros_like(t) for t in full]

    def run(function: Any, mesh: DeviceMesh, tensors: Callable[[], Any], where: str) -> Any:
        if rank >= mesh.size():
            return None
        made = state(tensors())
        function(made, checkpoint_id=tmp_path / where, process_group=mesh.get_group())
        return list(made.values())

    run(dcp.save, two, lambda: ragged(full, specs(two)), "ragged")
    run(dcp.save, three, lambda: [distribute_tensor(t, three, [Shard(0)]) for t in full], "shard")
    run(dcp.save, three, lambda: [t.as_dtensor() for t in ragged(full, others(three))], "shown")
    run(dcp.save, one, lambda: [t.clone() for t in full], "plain")
    dist.barrier()
    for where in ("ragged", "shard", "shown", "plain"):
        for mesh in (three, two, one):
            for cuts in (specs, others):
                found = run(dcp.load, mesh, lambda m=mesh, c=cuts: ragged(empty, c(m)), where)
                if found is not None:
                    same(found, full)
    for where in ("ragged", "shown"):
        same(
            run(dcp.load, three, lambda: [distribute_tensor(t, three, [Shard(0)]) for t in empty], where),
            full,
        )
        same(run(dcp.load, three, lambda: [t.clone() for t in empty], where), full)


@multirank(2)
def test_a_checkpoint_of_a_tensor_without_elements(rank: int, world_size: int, tmp_path: Path) -> None:
    cut = spec(world_mesh(2), (0, 3), 2)
    dcp.save({"t": RaggedTensor.from_full(torch.empty(0, 3), cut)}, checkpoint_id=tmp_path)
    dcp.load({"t": RaggedTensor.from_full(torch.empty(0, 3), cut)}, checkpoint_id=tmp_path)
    assert RaggedTensor.from_full(torch.empty(0, 3), cut).full_tensor().shape == (0, 3)


class Net(nn.Module):
    """Ragged parameters that a module shows in its state dict as the engine is to do: by ``as_dtensor``."""

    def __init__(self, full: list[torch.Tensor], cuts: list[RaggedSpec]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(t) for t in ragged(full, cuts))
        self.register_state_dict_post_hook(show)


def show(_: Any, found: dict[str, Any], *__: Any) -> None:
    for key, value in found.items():
        if isinstance(value, RaggedTensor):
            found[key] = value.as_dtensor()


def adam(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = p.detach() * 2
    optimizer.step()
    optimizer.zero_grad()

    def shown(_: Any, found: dict[str, Any]) -> None:
        found["state"] = {i: dict(state) for i, state in found["state"].items()}
        for inner in found["state"].values():
            show(None, inner)

    def taken(optimizer: torch.optim.Optimizer) -> None:
        for p, inner in optimizer.state.items():
            for key, value in inner.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    inner[key] = RaggedTensor.from_full(value, p.spec)

    optimizer.register_state_dict_post_hook(shown)
    optimizer.register_load_state_dict_post_hook(taken)
    return optimizer


@multirank(2)
def test_full_state_dicts_by_torch(rank: int, world_size: int) -> None:
    """``get_model_state_dict`` and its kin gather, offload, broadcast and distribute; for optimizers too."""
    mesh = world_mesh(world_size)
    full = values(shapes(specs(mesh)))
    model, plain = Net(full, specs(mesh)), nn.ParameterList(nn.Parameter(t.clone()) for t in full)
    optimizer, expected = adam(model), torch.optim.AdamW(plain, lr=0.1)
    for q in plain:
        q.grad = q.detach() * 2
    expected.step()
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        found = get_model_state_dict(model, options=options)
        moments = get_optimizer_state_dict(model, optimizer, options=options)
        if offload and rank:
            assert not found
            continue
        same(found.values(), plain, 1e-6)
        for p, inner in zip(plain, moments["state"].values(), strict=True):
            same([inner["exp_avg"]], [expected.state[p]["exp_avg"]], 1e-6)
    whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    moments = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        other = Net([torch.zeros_like(t) for t in full], others(mesh))
        again = adam(other)
        alone = broadcast and rank
        set_model_state_dict(other, {} if alone else dict(whole), options=options)
        set_optimizer_state_dict(other, again, {} if alone else copy.deepcopy(moments), options=options)
        same(other.parameters(), plain, 1e-6)
        for p, q in zip(other.parameters(), plain, strict=True):
            assert type(again.state[p]["exp_avg"]) is RaggedTensor
            same([again.state[p]["exp_avg_sq"]], [expected.state[q]["exp_avg_sq"]], 1e-6)
        for p in other.parameters():
            p.grad = p.detach() * 2
        again.step()


@multirank(2)
def test_sharded_state_dicts_by_torch(rank: int, world_size: int, tmp_path: Path) -> None:
    """The state dict shows a DTensor that gathers; torch's checkpoints, also asynchronous ones, take it."""
    mesh = world_mesh(world_size)
    full = values(shapes(specs(mesh)))
    model = Net(full, specs(mesh))
    found = model.state_dict()
    for t in found.values():
        assert isinstance(t, RaggedDTensor)
    for form in (
        lambda t: t,
        lambda t: t.clone(),
        lambda t: t.detach(),
        lambda t: t.to("cpu"),
        copy.deepcopy,
    ):
        same([form(t) for t in found.values()], full)
    same([t.redistribute(placements=[Shard(0)]) for t in found.values()], full)
    assert all(t.double().dtype == torch.float64 for t in found.values())
    dcp.async_save(get_model_state_dict(model), checkpoint_id=tmp_path / "async").result()
    optimizer = adam(model)
    moments = get_optimizer_state_dict(model, optimizer)
    dcp.save({"o": moments}, checkpoint_id=tmp_path / "optimizer")
    other = Net([torch.zeros_like(t) for t in full], others(mesh))
    values_of = get_model_state_dict(other)
    dcp.load(values_of, checkpoint_id=tmp_path / "async")
    same(other.parameters(), full)
    again = adam(other)
    loaded = {"o": get_optimizer_state_dict(other, again)}
    dcp.load(loaded, checkpoint_id=tmp_path / "optimizer")
    set_optimizer_state_dict(other, again, loaded["o"])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        same([again.state[q]["exp_avg"]], [optimizer.state[p]["exp_avg"].full_tensor()])
    other.load_state_dict(model.state_dict())  # cut otherwise
    same(other.parameters(), [p.full_tensor() for p in model.parameters()])


@multirank(2)
def test_without_the_state_dict_form_torch_returns_it_as_it_is(rank: int, world_size: int) -> None:
    """Why :meth:`as_dtensor` exists: torch's function asks nothing of a tensor that is no DTensor."""
    module = nn.Module()
    module.p = nn.Parameter(RaggedTensor.from_full(torch.ones(5, 3), spec(world_mesh(2), (5, 3), 2)))
    found = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    assert isinstance(found["p"], RaggedTensor)
    with pytest.raises(NotImplementedError, match=r"torch\.save"):
        torch.save(found, io.BytesIO())


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.empty = nn.Linear(4, 4), nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.empty.sum()


@multirank(4)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_empty_parameters_over_two_axes(rank: int, world_size: int, layout: str) -> None:
    mesh = world_mesh(2, 2)
    model = sw.fully_shard(WithEmpty(), mesh=mesh, strategy="hfsdp", layout=layout)
    model(torch.ones(2, 4)).sum().backward()
    assert model.empty.grad.shape == model.empty.full_tensor().shape == (0, 4)
