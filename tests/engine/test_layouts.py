"""Layouts and strategies of one and two axes together, against the plain model: numbers, bits, padding, refusals.

Every rank has its own data, and every rank's part of every parameter and gradient is compared (`whole`), so that a
replica that drifts is found. Of generated rows those run that tests/support/matrix.py selects, which tells how to run
all of them. torch's own optimizers and clipping are here, too.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import shardwright as sw
from shardwright.engine.extend.named_strategies import resolve
from tests.engine.kit.layouts import (
    LAYOUTS,
    Model,
    adamw,
    at,
    backward,
    backward_plain,
    build,
    check_gradients,
    check_outputs,
    check_parameters,
    shard,
    synchronise,
)
from tests.engine.kit.models import Reference, full, tokens
from tests.engine.kit.places import On, on_meshes
from tests.engine.kit.training import BF16, FP32
from tests.engine.programs import whole
from tests.support import multirank, world_mesh
from tests.support.matrix import select

# -- the matrix ------------------------------------------------------------------------------------------------------


LINE = [(1,), (2,), (3,), (4,)]
PLANE = [(2, 2), (1, 2), (2, 1), (4, 1)]
STAGES = {
    1: [resolve(name, 1).stages for name in ("ddp", "zero1", "zero2", "zero3")],
    2: [
        *[resolve(name, 2).stages for name in ("hsdp", "hfsdp", "zero1", "zero2", "zero3")],
        *[(2, 3), (3, 1), (3, 0), (1, 2)],
    ],
}
EVERYWHERE = [
    On(stages, shape) for n, shapes in ((1, LINE), (2, PLANE)) for stages in STAGES[n] for shape in shapes
]
#: For each micro-batch whether its gradients may be communicated, and whether it is said to be the last of the step.
ACCUMULATIONS = {
    "single": [(True, True)],
    "late": [(True, False), (True, False), (True, True)],
    "hold": [(False, True), (True, True)],
}
#: (compute, reduce, tolerance). The reference rounds its parameters and gradients to the compute dtype as well.
PRECISIONS = {"fp32": (FP32, FP32, 1e-5), "bf16": (BF16, FP32, 1e-4)}


class Row(NamedTuple):
    on: On
    layout: str
    accumulation: str
    precision: str

    def shows(self, strength: int) -> Iterator[Hashable]:
        return self.on.shows(strength, *self[1:])


ROWS = select(
    itertools.starmap(Row, itertools.product(EVERYWHERE, LAYOUTS, ACCUMULATIONS, PRECISIONS)), Row.shows
)


@on_meshes(ROWS)
def test_training_equals_the_plain_model(
    rank: int, world_size: int, on: On, layout: str, accumulation: str, precision: str
) -> None:
    compute, reduce, tolerance = PRECISIONS[precision]
    plain = build()
    reference = Reference(plain, compute, reduce)
    policy = sw.MixedPrecisionPolicy(
        None if compute is FP32 else compute, None if compute is FP32 else reduce
    )
    model = shard(plain, on, layout, mp_policy=policy)
    optimizer = sw.fully_shard_optimizer(adamw(model.parameters()))
    expected = adamw(reference.model.parameters())
    micros = ACCUMULATIONS[accumulation]
    for step in range(2):
        batches = [[tokens(step, m, r) for r in range(world_size)] for m in range(len(micros))]
        wanted = reference.backward(world_size, batches)
        for micro, (sync, last) in enumerate(micros):
            model.set_requires_gradient_sync(sync)
            model.set_is_last_backward(last)
            loss = backward(model, rank, step, micro)
            if rank == 0:
                assert loss.item() == pytest.approx(wanted[micro], rel=tolerance)
        check_gradients(model, reference.model, tolerance)
        norm = sw.clip_grad_norm_(model.parameters(), 0.2)
        wanted_norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.2)
        assert wanted_norm > 0.2
        assert norm.item() == pytest.approx(wanted_norm.item(), rel=tolerance)
        check_gradients(model, reference.model, tolerance)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
        check_parameters(model, reference.model, tolerance)
        synchronise(model, reference.model)
        if compute is FP32:
            check_outputs(model, reference.model, rank)
    for (name, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(full(p.detach()), q), name


# -- bits ------------------------------------------------------------------------------------------------------------


def train(model: Any, rank: int, steps: int = 3) -> Iterator[int]:
    """Without clipping, whose norm is summed in another order in each layout."""
    optimizer = sw.fully_shard_optimizer(adamw(model.parameters(), foreach=True))
    for step in range(steps):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        yield step


TWO_RANKS = [
    *[On(stages, (2,)) for stages in itertools.product(range(4))],
    *[On(stages, shape) for stages in itertools.product(range(4), repeat=2) for shape in ((1, 2), (2, 1))],
]


def bits_after_training(on: On, layout: str, accumulation: str, rank: int) -> dict[str, torch.Tensor]:
    """Parameters after steps without clipping, whose norm is summed in another order in each layout."""
    model = shard(build(), on, layout)
    optimizer = sw.fully_shard_optimizer(adamw(model.parameters(), foreach=True))
    for step in range(2):
        for micro, (sync, last) in enumerate(ACCUMULATIONS[accumulation]):
            model.set_requires_gradient_sync(sync)
            model.set_is_last_backward(last)
            backward(model, rank, step, micro)
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, whole(model)[0], strict=True))


@functools.cache
def bits_to_have(on: On, accumulation: str, rank: int) -> dict[str, torch.Tensor]:
    return bits_after_training(on, "per_parameter", accumulation, rank)


@pytest.mark.extensive(
    "each strategy on one and two axes", but=("zero3@2-*", "ddp@1x2-*", "zero2@1x2-*", "zero1@2x1-*")
)
@on_meshes(
    select(itertools.product(TWO_RANKS, ACCUMULATIONS), lambda row, strength: row[0].shows(strength, row[1]))
)
def test_layouts_are_equal_bit_for_bit(rank: int, world_size: int, on: On, accumulation: str) -> None:
    """Over two ranks a sum has one order: for every strategy, and without accumulation the same for all of them."""
    like = at("zero3", 2) if accumulation == "single" else on
    first = bits_to_have(like, accumulation, rank)
    assert not torch.equal(first["head.weight"], build().head.weight.double())
    for layout in LAYOUTS:
        if (like, "per_parameter") == (on, layout):
            continue
        found = bits_after_training(on, layout, accumulation, rank)
        assert found.keys() == first.keys()
        for name, value in found.items():
            assert torch.equal(value, first[name]), f"{name} of {layout}"


# -- padding ---------------------------------------------------------------------------------------------------------


def padding_of(model: nn.Module) -> list[torch.Tensor]:
    """The elements of the shards of all units that no parameter's part covers."""
    found = []
    for unit in dict.fromkeys(
        m.__dict__["_shardwright_unit"] for m in model.modules() if isinstance(m, sw.FSDPModule)
    ):
        locals_ = [p.sharded.to_local() for p in unit.parameters]
        for flat in unit.weights.shards:
            free = torch.ones(flat.numel(), dtype=torch.bool)
            for local in locals_:
                same = local.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
                if same and local.numel():
                    assert local.is_contiguous()
                    start = local.storage_offset() - flat.storage_offset()
                    assert free[start : start + local.numel()].all(), "parts overlap"
                    free[start : start + local.numel()] = False
            found.append(flat.detach()[free])
        shards = unit.weights.shards
        covered = sum(f.numel() for f in shards) - sum(f.numel() for f in found[-len(shards) :])
        assert covered == sum(local.numel() for local in locals_)
    return found


@pytest.mark.extensive("each layout", but=("hsdp@2x2-per_parameter", "*-element"))
@on_meshes(
    [
        (on, list(LAYOUTS)[j])
        for i, on in enumerate(
            (
                at("zero3", 2),
                at("zero2", 3),
                at("zero1", 4),
                at("hsdp", 2, 2),
                at("hfsdp", 2, 2),
                On((3, 2), (2, 2)),
            )
        )
        for j in ((0, 2), (1, 3))[i % 2]
    ]
)
def test_padding_stays_zero(rank: int, world_size: int, on: On, layout: str) -> None:
    model = shard(build(), on, layout)
    assert not any(p.any() for p in padding_of(model))
    for step in train(model, rank):
        padding = padding_of(model)
        assert not any(p.any() for p in padding), f"after step {step}"
        count = torch.tensor(sum(p.numel() for p in padding))
        dist.all_reduce(count)
        assert count > 0  # or nothing was tested
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
        torch._foreach_add_([p for p in model.parameters() if p.ndim], 1.0)
    model.load_state_dict(model.state_dict())
    for p in model.parameters():
        p.data = p.data + 1.0
    backward(model, rank)
    assert not any(p.any() for p in padding_of(model)), "after edits"


# -- torch's own -----------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "loop": {"foreach": False},
}
TORCHS_OWN = [
    (at("zero3", 2), "row"),
    (at("zero2", 3), "element"),
    (at("hsdp", 2, 2), "row"),
    (at("hfsdp", 2, 2), "blocks"),
]
SCALARS = ("with scalars", "without")  # 0-d parameters are replicated, in another kind of tensor


def by_turns(ways: Iterable[Any]) -> list[Any]:
    """Each way at each place, with scalars or without."""
    return [
        (*place, SCALARS[(i + j) % 2], way)
        for (i, place), (j, way) in itertools.product(enumerate(TORCHS_OWN), enumerate(ways))
    ]


def built(scalars: str) -> Model:
    plain = build()
    if scalars == "without":
        for block in plain.blocks:
            for name in ("scale", "shift"):
                value = getattr(block, name).detach()
                delattr(block, name)
                setattr(block, name, value)
    return plain


@pytest.mark.extensive("each loop of torch's at each place", but=("hsdp@2x2-row-with*", "zero3@2-*"))
@on_meshes(by_turns(OPTIMIZERS))
def test_optimizers_of_torch(
    rank: int, world_size: int, on: On, layout: str, scalars: str, optimizer: str
) -> None:
    plain = built(scalars)
    model = shard(copy.deepcopy(plain), on, layout)
    options = OPTIMIZERS[optimizer]
    ours, theirs = adamw(model.parameters(), **options), adamw(plain.parameters(), **options)
    for step in range(3):
        backward(model, rank, step)
        backward_plain(plain, world_size, step)
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
        check_parameters(model, plain)
        synchronise(model, plain)


@pytest.mark.extensive("each place", but=("hsdp@2x2-*", "zero3@2-*"))
@on_meshes(by_turns([True, False]))
def test_clipping_of_torch(
    rank: int, world_size: int, on: On, layout: str, scalars: str, foreach: bool
) -> None:
    plain = built(scalars)
    model = shard(copy.deepcopy(plain), on, layout)
    for number, kind in enumerate((2.0, 1.0, math.inf)):
        backward(model, rank, number)
        backward_plain(plain, world_size, number)
        norms = [
            nn.utils.clip_grad_norm_(one.parameters(), 0.1, norm_type=kind, foreach=foreach)
            for one in (model, plain)
        ]
        assert norms[1] > 0.1
        assert full(norms[0]).item() == pytest.approx(norms[1].item(), rel=1e-5)
        check_gradients(model, plain)
        for one in (model, plain):
            one.zero_grad()


# -- refusals --------------------------------------------------------------------------------------------------------


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "row"])
def test_parameters_stored_in_several_dtypes_are_cast_in_one_gather(
    rank: int, world_size: int, layout: str
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).double(), nn.Linear(3, 4).half())
    policy = sw.MixedPrecisionPolicy(param_dtype=BF16)
    model = sw.fully_shard(copy.deepcopy(plain), layout=LAYOUTS[layout], mp_policy=policy)
    x = torch.randn(2, 5)
    torch.testing.assert_close(model(x), plain.to(BF16)(x.to(BF16)), rtol=0, atol=0)
    assert [p.dtype for p in model.parameters()] == [FP32] * 2 + [torch.float64] * 2 + [torch.float16] * 2


@multirank(2)
def test_other_dimensions_are_refused_where_elements_are_cut(rank: int, world_size: int) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    plane = world_mesh(1, 2, names=("replicate", "shard"))
    ways: list[tuple[dict[str, Any], str]] = [
        ({"layout": layout, "mesh": world_mesh(2)}, "Ragged")
        for layout in ("ragged", *LAYOUTS.values())
        if layout != "per_parameter"
    ]
    for options, how in [*ways, ({"layout": sw.Ragged(2), "mesh": plane, "strategy": "hsdp"}, "Ragged")]:
        model = Two()
        with pytest.raises(ValueError) as caught:
            sw.fully_shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1), **options)
        message = str(caught.value)
        for part in ("shard_placement_fn", "dimension 1", "'left.weight'", how, "Shard(0)"):
            assert part in message, message
        assert type(model) is Two and all(type(p) is nn.Parameter for p in model.parameters())
        sw.fully_shard(model, shard_placement_fn=lambda p: Shard(0), **options)


@multirank(1)
def test_unknown_layouts_are_refused(rank: int, world_size: int) -> None:
    for layout in ("rows", "", None, 2, "Ragged", ("row",)):
        model = nn.Linear(4, 4)
        with pytest.raises(ValueError) as caught:
            sw.fully_shard(model, mesh=world_mesh(1), layout=layout)  # type: ignore[arg-type]
        for part in ("layout", repr(layout), "per_parameter", "ragged", "element"):
            assert part in str(caught.value)
        assert type(model) is nn.Linear
    for granule in ("rows", 0, -1, True, 1.5, None):
        with pytest.raises(ValueError, match=r'"row", "element", a number of rows') as caught:
            sw.Ragged(granule)  # type: ignore[arg-type]
        assert repr(granule) in str(caught.value)


@on_meshes([(at("zero3", 1), "row"), (at("zero3", 2), "row"), (at("hfsdp", 2, 2), "per_parameter")])
def test_saving_a_part_is_refused(rank: int, world_size: int, on: On, layout: str) -> None:
    """On every number of ranks, so that a program that is tried on one does not break on two."""
    model = shard(build(), on, layout)
    for what in (model.head.weight, model.state_dict(), {"weight": model.head.weight.detach()}):
        with pytest.raises(NotImplementedError) as caught:
            torch.save(what, io.BytesIO())
        for part in (
            "ragged tensor",
            "of shape",
            "torch.save",
            "full_tensor()",
            "torch.distributed.checkpoint",
        ):
            assert part in str(caught.value)
    with pytest.raises(TypeError, match=r"sharded Model cannot be pickled.*state_dict\(\)"):
        torch.save(model, io.BytesIO())
    whole = io.BytesIO()
    torch.save({name: full(p.detach()) for name, p in model.named_parameters()}, whole)
    whole.seek(0)
    loaded = torch.load(whole)
    assert all(math.prod(q.shape) == loaded[name].numel() for name, q in build().named_parameters())
