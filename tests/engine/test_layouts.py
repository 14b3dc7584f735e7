"""Layouts and strategies of one and two axes together, against the plain model: numbers, bits, states, edits, refusals.

Every rank has its own data, and every rank's part of every parameter and gradient is compared (`whole`), so that a
replica that drifts is found. Of generated rows those run that tests/support/matrix.py selects, which tells how to run
all of them.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Shard

import shardwright as sw
from shardwright.layout import resolve
from tests.engine.kit.models import Reference, full, loss_of, tokens
from tests.engine.kit.places import On, on_meshes
from tests.engine.kit.training import BF16, FP32
from tests.engine.programs import whole
from tests.support import multirank, world_mesh
from tests.support.matrix import select

LAYOUTS: dict[str, str | sw.Ragged] = {
    "row": sw.Ragged("row"),
    "blocks": sw.Ragged(2),
    "element": sw.Ragged("element"),
    "per_parameter": "per_parameter",
}
#: Where steps follow each other and rounding adds up; what is wrong is wrong by more.
LOOSE = 1e-4
WHOLE = StateDictOptions(full_state_dict=True)


def at(name: str, *shape: int) -> On:
    return On(resolve(name, len(shape)).stages, shape)


class Block(nn.Module):
    """Sizes that no number of ranks divides, of 0 to 3 dimensions, two of 0; one unused, one frozen."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 13)
        self.down = nn.Linear(13, dim, bias=False)
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.2))
        self.mix = nn.Parameter(torch.randn(3, 2, dim) / 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.randn(5, dim) / 4, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.down(torch.tanh(self.up(self.norm(x)) + self.shift))
        return x + (x @ self.frozen.t())[..., :1] + (x @ self.mix.flatten(0, 1).t()).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, dim: int = 7, vocab: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def shard(model: Model, on: On, layout: str, **options: Any) -> Any:
    """The blocks and the rest: three units. Full parameters that were released hold garbage."""
    os.environ["SHARDWRIGHT_POISON"] = "1"
    options = {"mesh": on.mesh, "strategy": on.strategy, "layout": LAYOUTS[layout], **options}
    for block in model.blocks:
        sw.fully_shard(block, **options)
    return sw.fully_shard(model, **options)


def backward(model: Any, rank: int, step: int = 0, micro: int = 0) -> torch.Tensor:
    batch = tokens(step, micro, rank)
    loss = loss_of(model(batch), batch)
    loss.backward()
    return loss.detach()


def backward_plain(plain: nn.Module, world_size: int, step: int = 0, micro: int = 0) -> None:
    """The mean over all ranks' data."""
    for rank in range(world_size):
        batch = tokens(step, micro, rank)
        (loss_of(plain(batch), batch) / world_size).backward()


def check(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = LOOSE) -> None:
    """Relative to the largest element."""
    assert found.shape == expected.shape, name
    error = (found - expected.detach()).abs().max().item() / max(expected.abs().max().item(), 1e-2)
    assert error <= tolerance, f"{name} is off by {error:.2e} of its largest element"


def check_parameters(model: nn.Module, plain: nn.Module, tolerance: float = LOOSE) -> None:
    """Every rank must call it. `whole` finds replicas that drift and what is missing or there twice."""
    values, _, _ = whole(model)
    for (name, p), q, value in zip(model.named_parameters(), plain.parameters(), values, strict=True):
        assert p.shape == q.shape and p.dtype == q.dtype, name
        check(name, value, q, tolerance)


def check_gradients(model: nn.Module, plain: nn.Module, tolerance: float = LOOSE) -> None:
    _, gradients, _ = whole(model)
    for (name, p), q, gradient in zip(model.named_parameters(), plain.parameters(), gradients, strict=True):
        assert (p.grad is None) == (q.grad is None), f"{name}.grad is {p.grad}, expected {q.grad}"
        if q.grad is not None:
            assert p.grad.device_mesh == p.device_mesh and p.grad.to_local().shape == p.to_local().shape, name
            assert p.grad.shape == q.grad.shape and p.grad.dtype == q.grad.dtype, name
            check(f"gradient of {name}", gradient, q.grad, tolerance)


@torch.no_grad()
def synchronise(model: nn.Module, plain: nn.Module) -> None:
    """Copy the parameters, compared just now, into ``plain``: rounding does not add up, nor flip that of a copy."""
    for q, value in zip(plain.parameters(), whole(model)[0], strict=True):
        q.copy_(value)


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    """Its division by the root of the second moment must not blow up what cancelled to almost nothing."""
    return torch.optim.AdamW(parameters, **{"lr": 0.03, "eps": 1e-3, **options})


def step_both(model: Any, plain: nn.Module, rank: int, world_size: int, step: int = 0) -> None:
    """A step of SGD by optimizers made for the parameters of now."""
    for one in (model, plain):
        one.zero_grad()
    backward(model, rank, step)
    backward_plain(plain, world_size, step)
    check_gradients(model, plain)
    for one in (model, plain):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        one.zero_grad()
    check_parameters(model, plain)


def check_outputs(model: Any, plain: nn.Module, rank: int) -> None:
    batch = tokens(9, 9, rank)
    with torch.no_grad():
        torch.testing.assert_close(model(batch), plain(batch), rtol=1e-4, atol=1e-5)


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
    """What no parameter's part covers of the shards of all units."""
    found = []
    for unit in dict.fromkeys(
        m.__dict__["_shardwright_unit"] for m in model.modules() if isinstance(m, sw.FSDPModule)
    ):
        locals_ = [p.sharded.to_local() for p in unit.parameters]
        for flat in unit.shards:
            free = torch.ones(flat.numel(), dtype=torch.bool)
            for local in locals_:
                same = local.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
                if same and local.numel():
                    assert local.is_contiguous()
                    start = local.storage_offset() - flat.storage_offset()
                    assert free[start : start + local.numel()].all(), "parts overlap"
                    free[start : start + local.numel()] = False
            found.append(flat.detach()[free])
        covered = sum(f.numel() for f in unit.shards) - sum(f.numel() for f in found[-len(unit.shards) :])
        assert covered == sum(local.numel() for local in locals_)
    return found


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


# -- state dicts -----------------------------------------------------------------------------------------------------

STATES = [
    (at("zero3", 2), "row"),
    (at("zero2", 3), "element"),
    (at("hsdp", 2, 2), "row"),
    (at("hfsdp", 2, 2), "per_parameter"),
    (at("hfsdp", 2, 2), "blocks"),
]


def trained(on: On, layout: str, rank: int, world_size: int) -> tuple[Any, Any, nn.Module, torch.optim.AdamW]:
    """A sharded and a plain model after the same step, with their optimizers."""
    plain = build()
    for block in plain.blocks:  # torch loads no optimizer state that lacks a parameter which needs gradients
        block.unused.requires_grad_(False)
    model = shard(copy.deepcopy(plain), on, layout)
    optimizer, expected = sw.fully_shard_optimizer(adamw(model.parameters())), adamw(plain.parameters())
    backward(model, rank)
    backward_plain(plain, world_size)
    for each in (optimizer, expected):
        each.step()
        each.zero_grad()
    check_parameters(model, plain)
    return model, optimizer, plain, expected


@on_meshes(STATES)
def test_full_state_dicts(rank: int, world_size: int, on: On, layout: str) -> None:
    model, optimizer, plain, expected = trained(on, layout, rank, world_size)
    found = get_model_state_dict(model, options=WHOLE)
    assert found.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert type(found[name]) is torch.Tensor
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    states = get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]
    wanted = get_optimizer_state_dict(plain, expected)["state"]
    assert states.keys() == wanted.keys()
    for name, state in wanted.items():
        assert states[name].keys() == state.keys()
        for key, value in state.items():
            assert type(states[name][key]) is torch.Tensor
            torch.testing.assert_close(states[name][key], value, rtol=1e-5, atol=1e-6)


@on_meshes(STATES)
def test_checkpoints_load_into_other_layouts(
    rank: int, world_size: int, on: On, layout: str, tmp_path: Path
) -> None:
    """Model and optimizer, saved from one layout and strategy, go on in another as if nothing had happened."""
    model, optimizer, plain, expected = trained(on, layout, rank, world_size)
    states, optimizer_states = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=tmp_path)
    backward_plain(plain, world_size, 1)
    expected.step()
    for other, name in (
        (at("zero3", world_size), "per_parameter"),
        (at("zero3", world_size), "blocks"),
        (on, "row"),
    ):
        fresh = build(1)
        for block in fresh.blocks:
            block.unused.requires_grad_(False)
        model = shard(fresh, other, name)
        optimizer = sw.fully_shard_optimizer(adamw(model.parameters()))
        states, optimizer_states = get_state_dict(model, optimizer)
        loaded = {"model": states, "optimizer": optimizer_states}
        dcp.load(loaded, checkpoint_id=tmp_path)
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        backward(model, rank, 1)
        optimizer.step()
        check_parameters(model, plain)


@on_meshes(STATES)
def test_plain_and_sharded_state_dicts_load(rank: int, world_size: int, on: On, layout: str) -> None:
    model, _, plain, _ = trained(on, layout, rank, world_size)
    sharded = {name: value.clone() for name, value in model.state_dict().items()}
    other = build(2)
    model.load_state_dict(other.state_dict())
    check_parameters(model, other, 0.0)
    model.load_state_dict(sharded)
    check_parameters(model, plain)
    averaged = {name: 0.5 * value + sharded[name] * 0.25 for name, value in sharded.items()}
    model.load_state_dict(averaged)
    with torch.no_grad():
        for q in plain.parameters():
            q.mul_(0.75)
    check_parameters(model, plain)
    set_model_state_dict(
        model,
        other.state_dict() if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    check_parameters(model, other, 0.0)
    step_both(model, other, rank, world_size)


@on_meshes(STATES)
def test_half_and_back(rank: int, world_size: int, on: On, layout: str) -> None:
    model, _, plain, _ = trained(on, layout, rank, world_size)
    synchronise(model, plain)
    for one in (model, plain):
        one.half()
    check_parameters(model, plain, 0.0)
    for one in (model, plain):
        one.float()
    check_parameters(model, plain, 0.0)
    step_both(model, plain, rank, world_size, 1)


# -- edits, copies, freezing, exceptions -----------------------------------------------------------------------------

EDITED = [
    (at("zero3", 3), "row"),
    (at("hfsdp", 2, 2), "row"),
    (at("hfsdp", 2, 2), "per_parameter"),
    (at("hfsdp", 2, 1), "element"),
    (On((2, 3), (2, 2)), "blocks"),
]


@on_meshes(EDITED)
def test_deep_copies_are_independent(rank: int, world_size: int, on: On, layout: str) -> None:
    plain = build()
    model = shard(copy.deepcopy(plain), on, layout)
    step_both(model, plain, rank, world_size)
    twin, plain_twin = copy.deepcopy(model), copy.deepcopy(plain)
    for step in (1, 2):
        step_both(model, plain, rank, world_size, step)
    check_parameters(twin, plain_twin)
    for step in (3, 4):
        step_both(twin, plain_twin, rank, world_size, step)
    check_parameters(model, plain)
    check_outputs(model, plain, rank)


def scale_data(p: torch.Tensor) -> None:
    p.data.mul_(1.25)


def set_data(p: torch.Tensor) -> None:
    p.data = p.data * 0.5


@torch.no_grad()
def scale(p: torch.Tensor) -> None:
    p.mul_(1.5)


@torch.no_grad()
def copy_whole(p: torch.Tensor) -> None:
    p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view(p.shape))


EDITS: list[Callable[[torch.Tensor], None]] = [scale_data, set_data, scale, copy_whole]


@on_meshes(EDITED)
def test_edits_are_seen(rank: int, world_size: int, on: On, layout: str) -> None:
    """After a backward, which leaves what the strategy keeps until the optimizer's step."""
    plain = build()
    model = shard(copy.deepcopy(plain), on, layout)
    for number, edit in enumerate(EDITS):
        backward(model, rank, number)
        for one in (model, plain):
            one.zero_grad()
            for p in one.parameters():
                edit(p)
        check_outputs(model, plain, rank)
        check_parameters(model, plain)
    step_both(model, plain, rank, world_size)


@on_meshes(EDITED)
def test_state_dicts_load_strictly(rank: int, world_size: int, on: On, layout: str) -> None:
    model, other = shard(build(), on, layout), build(1)
    backward(model, rank)
    model.zero_grad()
    state = other.state_dict()
    model.load_state_dict(state, strict=True)
    check_outputs(model, other, rank)
    step_both(model, other, rank, world_size)
    for name, change in {"blocks.1.up.weight": "Missing key", "extra": "Unexpected key"}.items():
        wrong = (
            {**state, "extra": torch.ones(2)}
            if name == "extra"
            else {k: v for k, v in state.items() if k != name}
        )
        with pytest.raises(RuntimeError, match=f'{change}.*\n?.*"{name}"'):
            model.load_state_dict(wrong, strict=True)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight"):
        model.load_state_dict({**state, "blocks.0.up.weight": torch.ones(14, 7)}, strict=True)


@on_meshes(
    [
        (*place, way)
        for (i, place), (j, way) in itertools.product(enumerate(EDITED), enumerate(("late", "hold", "each")))
        if i % 3 != j
    ]
)
def test_freezing_between_micro_batches(
    rank: int, world_size: int, on: On, layout: str, accumulation: str
) -> None:
    """What the first micro-batch gave to a parameter that is frozen since stays in its gradient, as in plain torch."""
    plain = build()
    model = shard(copy.deepcopy(plain), on, layout)
    for step in range(2):
        for micro in range(3):
            model.set_requires_gradient_sync(accumulation != "hold" or micro == 2)
            model.set_is_last_backward(accumulation != "late" or micro == 2)
            backward(model, rank, step, micro)
            backward_plain(plain, world_size, step, micro)
            for one in (model, plain):
                one.blocks[0].up.weight.requires_grad_(micro == 2)
                one.head.requires_grad_(micro != 0)
                one.blocks[1].frozen.requires_grad_(micro == 1)
        check_gradients(model, plain)
        for one in (model, plain):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
        check_parameters(model, plain)


class Boom(Exception):
    pass


@on_meshes(EDITED)
def test_training_goes_on_after_an_exception_in_backward(
    rank: int, world_size: int, on: On, layout: str
) -> None:
    def fail(*_: object) -> None:
        raise Boom

    plain = build()
    model = shard(copy.deepcopy(plain), on, layout)
    for step, (sync, last) in enumerate(itertools.product((True, False), repeat=2)):
        model.set_requires_gradient_sync(sync)
        model.set_is_last_backward(last)
        backward(model, rank, 7)
        handle = model.blocks[0].up.register_full_backward_hook(fail)
        with pytest.raises(Boom):
            backward(model, rank, 8)
        handle.remove()
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
        step_both(model, plain, rank, world_size, step)


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
        for part in ("layout", repr(layout), '"per_parameter"', '"ragged"', "Ragged"):
            assert part in str(caught.value)
        assert type(model) is nn.Linear
    for granule in ("rows", 0, -1, True, 1.5, None):
        with pytest.raises(ValueError, match=r'"row", "element" or a number of rows') as caught:
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
