"""Strategies on meshes of one and two axes, against the plain model: training, evaluation, edits, states, refusals.

Every rank has its own data, and each compares its own part of every parameter and gradient with the plain model's, so
that a replica that drifts is found. Of generated rows those run that tests/support/matrix.py selects, which tells how
to run all of them.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.engine import RaggedTensor
from tests.engine.kit.counting import counted
from tests.engine.kit.models import Reference, build, loss_of, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.engine.kit.strategies import EVERYWHERE, OTHERS, SOME, some
from tests.engine.kit.training import (
    BF16,
    FP16,
    FP32,
    UNITS,
    Sharded,
    backward,
    check,
    check_gradients,
    expected_gradients,
    is_cut_as,
    local_of,
    part_of,
    set_micro,
    sharded,
)
from tests.support import world_mesh
from tests.support.matrix import covering, everything, select


@torch.no_grad()
def synchronise(model: nn.Module, plain: nn.Module) -> None:
    """Copy the parameters, which were compared just now, into ``plain``: then rounding does not add up over steps,
    nor flip the rounding of a low-precision copy. One collective, which counts what every replica has: no element is
    missing, none is on one rank more than the others."""
    flats = [torch.zeros(2, *p.shape, dtype=torch.float64) for p in plain.parameters()]
    for flat, p in zip(flats, model.parameters(), strict=True):
        part_of(flat[0], p).add_(local_of(p))
        part_of(flat[1], p).add_(1.0)
    everything = torch.cat([flat.view(-1) for flat in flats])
    dist.all_reduce(everything)
    for flat, p in zip(everything.split([f.numel() for f in flats]), plain.parameters(), strict=True):
        total, count = flat.view(2, *p.shape)
        assert count.min() == count.max() >= 1
        p.copy_(total / count)


# -- the matrix ------------------------------------------------------------------------------------------------------


#: (compute, reduce, tolerance): fp32 sums differ in order only; lower reduce dtypes round the sum itself once or twice.
PRECISIONS = {"fp32": (FP32, FP32, 1e-5), "bf16": (BF16, FP32, 1e-5), "fp16": (FP16, FP16, 1e-2)}
#: For each micro-batch whether its gradients may be communicated, and whether it is said to be the last of the step.
ACCUMULATIONS = {
    "single": [(True, True)],
    "each": [(True, True), (True, True)],
    "hold": [(False, True), (True, True)],
    "late": [(True, False), (True, False), (True, True)],
    "left": [(True, False), (True, False)],  # for clipping to complete
    "mixed": [(False, True), (True, False), (True, True)],
}


class Row(NamedTuple):
    at: On
    accumulation: str
    precision: str
    reshard: bool | None

    def shows(self, strength: int) -> Iterator[Hashable]:
        return self.at.shows(strength, *self[1:])


def every_row() -> list[Row]:
    return [
        Row(at, *rest)
        for at in EVERYWHERE
        for rest in itertools.product(ACCUMULATIONS, PRECISIONS, at.reshards)
    ]


ROWS = select(every_row(), Row.shows)


@on_meshes(ROWS)
def test_training_equals_the_plain_model(
    rank: int, world_size: int, at: On, accumulation: str, precision: str, reshard: bool | None
) -> None:
    os.environ["SHARDWRIGHT_POISON"] = "1"
    compute, reduce, tolerance = PRECISIONS[precision]
    plain = build()
    reference = Reference(plain, compute, reduce)
    policy = sw.MixedPrecisionPolicy(
        param_dtype=None if compute is FP32 else compute, reduce_dtype=None if reduce is compute else reduce
    )
    model = sharded(at, plain, reshard_after_forward=reshard, mp_policy=policy)
    # AdamW divides by the root of its second moment: eps keeps it from blowing up what cancelled to almost nothing.
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.03, eps=1e-3))
    expected = torch.optim.AdamW(reference.model.parameters(), lr=0.03, eps=1e-3)
    micros = ACCUMULATIONS[accumulation]
    for step in range(2):
        batches = [[tokens(step, m, r) for r in range(world_size)] for m in range(len(micros))]
        wanted = reference.backward(world_size, batches)
        for micro, flags in enumerate(micros):
            set_micro(model, *flags)
            loss = backward(model, rank, step, micro)
            if rank == 0:
                assert loss == pytest.approx(wanted[micro], rel=tolerance)
        if accumulation != "left":
            check_gradients(model, [p.grad for p in reference.model.parameters()], tolerance)
        norm = sw.clip_grad_norm_(model.parameters(), 0.2)
        wanted_norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.2)
        assert wanted_norm > 0.2
        assert norm.item() == pytest.approx(wanted_norm.item(), rel=tolerance)
        check_gradients(model, [p.grad for p in reference.model.parameters()], tolerance)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        for (name, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
            assert is_cut_as(p, at), name
            check(name, p, q, tolerance)
        synchronise(model, reference.model)


def test_rows_cover_pairs_of_settings() -> None:
    every = every_row()
    chosen = covering(every, lambda row: row.shows(2))
    assert len(chosen) < len(every) / 50 and chosen == covering(every, lambda row: row.shows(2))

    def pairs(row: Row) -> set[Any]:
        axes = [(len(row.at.shape), i, stage) for i, stage in enumerate(row.at.stages)]
        found = set(itertools.combinations([*axes, *enumerate((row.at.shape, *row[1:]))], 2))
        return found | ({row.at.stages} if row.at.shape == (2, 2) else set())

    missing = set().union(*map(pairs, every)) - set().union(*map(pairs, chosen))
    assert not missing, missing


# -- two root calls, one backward ------------------------------------------------------------------------------------


#: A unit that is reduced while its first reduction is under way, in each place where one can be: reduce-scattered, or
#: summed over the replicas. Of few units and many buffers nothing else waits for the first one before.
TWICE = [
    (at, *settings)
    for i, at in enumerate((
        *on("zero3", (2,), (3,)),
        *on("hsdp", (2, 2), (1, 2)),
        *on("hfsdp", (2, 2)),
        *on("zero1", (2,)),
        *on("zero2", (2,)),
        *on("3-0", (2, 2)),
        *on("1-2", (2, 2)),
    ))
    for j, settings in enumerate((
        ("single", 2, 1),
        ("late", 8, UNITS),
        ("each", 2, 2),
        ("single", 1, 2),
        ("mixed", 2, 1),
        ("hold", 2, UNITS),
    ))
    if (i + j) % 2 == 0 or everything()
]  # fmt: skip


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((5, 7), (7, 6), (6, 5), (5, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() + 0.3 * x.sum()


@pytest.mark.extensive("each strategy", but=("zero3@*", "zero2@2-*", "zero1@2-*", "hsdp@2x2-*", "ddp@*"))
@on_meshes(TWICE)
def test_a_unit_reduced_twice_in_one_backward(
    rank: int, world_size: int, at: On, accumulation: str, buffers: int, units: int
) -> None:
    """Two calls of the root go into one loss: backward ends each unit's visit of the second call, then of the first."""
    os.environ["SHARDWRIGHT_POISON"] = "1"
    torch.manual_seed(0)
    plain = Chain()
    model: Any = copy.deepcopy(plain)
    for part in [*model.layers[: units - 1], model]:
        sw.fully_shard(part, mesh=at.mesh, strategy=at.strategy)
    model.set_reduce_scatter_max_input_buffers(buffers)
    collectives = sum(size > 1 for size in at.shape)

    def loss_of_two_calls(one: nn.Module, *place: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(place))
        # Inputs that need gradients say when backward is through with a call.
        first, second = (torch.randn(n, 5, generator=generator).requires_grad_() for n in (2, 3))
        return one(first) + 2.0 * one(second)

    for step in range(2):
        for micro, flags in enumerate(ACCUMULATIONS[accumulation]):
            set_micro(model, *flags)
            loss = loss_of_two_calls(model, step, micro, rank)
            with counted() as seen:
                loss.backward()
            if accumulation in ("single", "each"):
                reductions = seen["reduce_scatter"] + seen["all_reduce"]
                assert reductions == 2 * units * collectives, "or this test shows nothing"
            for r in range(world_size):
                (loss_of_two_calls(plain, step, micro, r) / world_size).backward()
        check_gradients(model, [p.grad for p in plain.parameters()])
        for one in (model, plain):
            one.zero_grad()


# -- evaluation and edits --------------------------------------------------------------------------------------------


@pytest.mark.extensive("each strategy", but=("zero3@2", "hsdp@2x2", "zero2@3", "zero1@2"))
@on_meshes(some(0))
def test_evaluation_after_training_twice_in_a_row(rank: int, world_size: int, at: On) -> None:
    """Copies that a step keeps are not stale and have the right shape: after backward, and after the optimizer."""
    os.environ["SHARDWRIGHT_POISON"] = "1"
    plain = build()
    seen: list[torch.Size] = []
    model = sharded(at)
    for block in model.blocks:
        block.up.register_forward_hook(lambda m, a, o: seen.append(m.weight.shape))
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3))
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1, eps=1e-3)

    def evaluate() -> None:
        for grad, number in itertools.product((False, True), range(2)):
            model.eval()
            with torch.set_grad_enabled(grad):
                batch = tokens(number, 7, rank)
                torch.testing.assert_close(model(batch), plain(batch), rtol=1e-5, atol=1e-5)
        model.train()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert is_cut_as(p, at) and p.shape == q.shape

    for step in range(2):
        evaluate()
        backward(model, rank, step)
        evaluate()
        reference = Reference(plain, FP32, FP32)
        reference.backward(world_size, [[tokens(step, 0, r) for r in range(world_size)]])
        for p, q in zip(plain.parameters(), reference.model.parameters(), strict=True):
            p.grad = q.grad
        check_gradients(model, [p.grad for p in plain.parameters()])
        optimizer.step()
        expected.step()
        evaluate()
        optimizer.zero_grad()
        synchronise(model, plain)
    assert set(seen) == {plain.blocks[0].up.weight.shape}


@pytest.mark.extensive("each strategy", but=("hsdp@2x2", "zero2@*", "zero1@2", "ddp@2"))
@on_meshes(some(1))
def test_edits_between_micro_batches_are_seen(rank: int, world_size: int, at: On) -> None:
    """Copies that are kept for a step are dropped when the weights change, however they change."""
    model, plain = sharded(at), build()
    other = build(seed=5)

    @torch.no_grad()
    def scale_parts(one: nn.Module) -> None:
        for p in one.parameters():
            local_of(p).mul_(1.25)

    @torch.no_grad()
    def scale_by_foreach(one: nn.Module) -> None:
        torch._foreach_mul_([local_of(p) for p in one.parameters()], 0.5)

    @torch.no_grad()
    def scale_through_data(one: nn.Module) -> None:
        for p in one.parameters():
            p.data.mul_(1.5)

    @torch.no_grad()
    def load(one: nn.Module) -> None:
        state = {name: q.clone() for name, q in other.state_dict().items()}
        if one is model:
            state = {name: cut(q, one.get_parameter(name)) for name, q in state.items()}
        one.load_state_dict(state)

    def cut(q: torch.Tensor, like: Sharded) -> Sharded:
        part = part_of(q, like).clone()
        if isinstance(like, RaggedTensor):
            return RaggedTensor(part.view(like.to_local().shape), like.spec)
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=q.shape, stride=q.stride()
        )

    for number, edit in enumerate((scale_parts, scale_by_foreach, scale_through_data, load)):
        backward(model, rank, number)  # leaves what the strategy keeps
        model.zero_grad()
        edit(model)
        edit(plain)
        batch = tokens(number, 3, rank)
        torch.testing.assert_close(model(batch), plain(batch), rtol=1e-5, atol=1e-5, msg=edit.__name__)


@on_meshes([each for each in some(2) if max(each.stages) < 3])
def test_what_was_left_is_reduced_by_the_optimizers_step(rank: int, world_size: int, at: On) -> None:
    model, plain = sharded(at), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for micro in range(2):
        set_micro(model, True, False)
        backward(model, rank, 0, micro)
    optimizer.step()
    gradients = expected_gradients(world_size, micros=2)
    check_gradients(model, gradients)
    for (name, p), q, g in zip(model.named_parameters(), plain.parameters(), gradients, strict=True):
        check(name, p, q - 0.5 * g, 1e-5)


@pytest.mark.extensive("each strategy", but=("zero2@*", "zero1@2", "hsdp@2x2"))
@on_meshes(some(0))
def test_zero_grad_forgets_what_was_left(rank: int, world_size: int, at: On) -> None:
    model = sharded(at)
    for sync, last in ((True, False), (False, False)):
        set_micro(model, sync, last)
        backward(model, rank, 3)
        set_micro(model, True, False)
        backward(model, rank, 4)
        model.zero_grad()
        set_micro(model, True, True)
        backward(model, rank)
        check_gradients(model, expected_gradients(world_size))
        model.zero_grad()


# -- several models, state dicts -------------------------------------------------------------------------------------


@on_meshes(on("hsdp", (2, 2)) + on("hfsdp", (2, 2)))
def test_models_of_different_strategies_do_not_see_each_other(rank: int, world_size: int, at: On) -> None:
    flat, low = (4,), sw.MixedPrecisionPolicy(BF16, reduce_dtype=FP32)
    others = [*on("zero1", flat), *on("zero3", flat), *on("ddp", flat), *on("0-2", (4, 1))]
    settings = [(at, FP32), *[(each, BF16 if i == 1 else FP32) for i, each in enumerate(others)]]
    models = [
        sharded(each, build(seed), mp_policy=low if dtype is BF16 else sw.MixedPrecisionPolicy())
        for seed, (each, dtype) in enumerate(settings)
    ]
    optimizers = [
        sw.fully_shard_optimizer(torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3)) for m in models
    ]
    states = [{n: local_of(p).clone() for n, p in m.state_dict().items()} for m in models]
    for step in range(2):
        # Forwards and backwards of all are interleaved; one steps in each turn.
        batch = tokens(step, 0, rank)
        losses = [loss_of(model(batch), batch) for model in models]
        for i in (2, 0, 4, 1, 3):
            losses[i].backward()
        for seed, ((_, dtype), model) in enumerate(zip(settings, models, strict=True)):
            if step == 0:
                reference = Reference(build(seed), dtype, FP32)
                reference.backward(world_size, [[tokens(step, 0, r) for r in range(world_size)]])
                check_gradients(model, [p.grad for p in reference.model.parameters()])
        optimizers[step].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for i, (each, model, before) in enumerate(zip([s[0] for s in settings], models, states, strict=True)):
        for name, value in model.state_dict().items():
            assert isinstance(value, DTensor) and value.device_mesh == each.mesh
            assert value.placements == each.placements
            assert torch.equal(local_of(value), before[name]) == (i > 1), (i, name)


@pytest.mark.extensive(
    "each strategy", but=("zero3@2", "hsdp@2x2", "zero2@3", "zero1@2", "3-1@2x2", "2-0@2x2")
)
@on_meshes(SOME + OTHERS)
def test_state_dicts_are_dtensors_of_the_mesh(rank: int, world_size: int, at: On) -> None:
    model, plain = sharded(at), build()
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    backward(model, rank)
    optimizer.step()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in state.items():
        assert isinstance(value, DTensor) and value.device_mesh == at.mesh, name
        assert value.placements == at.placements and value.shape == plain.get_parameter(name).shape
    for moments in optimizer.state_dict()["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(moments[key], DTensor) and moments[key].placements == at.placements
    if not at.shape[0] == 1 == len(at.shape):
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name, value in whole.items():  # replicas are equal: parts of any one are parts of the whole
            assert torch.equal(part_of(value, state[name]), local_of(state[name])), name
    copy = sharded(at, build(seed=9))
    copy.load_state_dict(state)
    batch = tokens(1, 1, rank)
    assert torch.equal(copy(batch), model(batch))


# -- refusals --------------------------------------------------------------------------------------------------------


@on_meshes(on("zero3", (2,)))
def test_illegal_combinations_are_refused_by_name(rank: int, world_size: int, at: On) -> None:
    line, square = at.mesh, world_mesh(1, 2, names=("replicate", "shard"))
    cube = world_mesh(1, 1, 2)
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"mesh": line, "strategy": "zero1", "reshard_after_forward": True},
            "reshard_after_forward=True.*'zero1'",
        ),
        (
            {"mesh": line, "strategy": "zero2", "reshard_after_forward": True},
            "reshard_after_forward=True.*'zero2'",
        ),
        ({"mesh": cube}, "one dimension, or of two.* got 3 dimensions of shape"),
        ({"mesh": cube, "strategy": "zero3"}, "got 3 dimensions"),
        ({"mesh": line, "strategy": "hsdp"}, "'hsdp' is for a mesh of 2 dimensions, and this mesh has 1"),
        ({"mesh": square, "strategy": sw.Strategy("shard", "shard", "shard")}, "and this mesh has 2"),
        (
            {"mesh": line, "strategy": "fsdp"},
            "one of ddp, zero1, zero2, zero3, hsdp, hfsdp, or an import path .*, found 'fsdp'",
        ),
    ]
    for options, message in cases:
        model = nn.Linear(4, 4)
        with pytest.raises(ValueError, match=message):
            sw.fully_shard(model, **options)
        assert type(model) is nn.Linear and type(model.weight) is nn.Parameter
        sw.fully_shard(model, mesh=line)  # nothing was done to it


@on_meshes([each for each in EVERYWHERE if each.shape in ((1,), (1, 2), (2, 1))])
def test_what_is_refused_does_not_depend_on_the_number_of_ranks(rank: int, world_size: int, at: On) -> None:
    if True in at.reshards:
        sw.fully_shard(nn.Linear(4, 4), mesh=at.mesh, strategy=at.strategy, reshard_after_forward=True)
        return
    with pytest.raises(ValueError, match="reshard_after_forward=True"):
        sw.fully_shard(nn.Linear(4, 4), mesh=at.mesh, strategy=at.strategy, reshard_after_forward=True)
