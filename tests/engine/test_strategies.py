"""Strategies on meshes of one and two axes, against the plain model: numbers, collectives, bytes, refusals.

Every rank has its own data, and each compares its own part of every parameter and gradient with the plain model's, so
that a replica that drifts is found. Of generated rows those run that tests/support/matrix.py selects, which tells how
to run all of them.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.comm import Communicator, Pending
from shardwright.engine.ragged import RaggedTensor
from tests.engine.kit.counting import counted
from tests.engine.kit.models import Reference, build, loss_of, tokens
from tests.engine.kit.places import On, Shape, Stages, on, on_meshes
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
    modules_of,
    part_of,
    set_micro,
    sharded,
    units_of,
)
from tests.support import world_mesh
from tests.support.matrix import covering, everything, select, together

STAGES: dict[int, list[Stages]] = {n: list(itertools.product(range(4), repeat=n)) for n in (1, 2)}
SHAPES: dict[int, list[Shape]] = {1: [(1,), (2,), (3,), (4,)], 2: [(2, 2), (1, 2), (2, 1), (4, 1)]}


EVERYWHERE = [On(stages, shape) for n in (1, 2) for stages in STAGES[n] for shape in SHAPES[n]]
#: Each kind of reduction once, and other kinds of step: a test runs on the former and on a third of the latter.
SOME = [
    *on("ddp", (2,)),
    *on("zero1", (2,)),
    *on("zero2", (3,)),
    *on("zero3", (2,)),
    *on("hsdp", (2, 2)),
    *on("hfsdp", (2, 2)),
]
OTHERS = [
    *on("zero1", (2, 2)),
    *on("hsdp", (1, 2)),
    *on("hfsdp", (2, 1)),
    *on("0-2", (2, 2)),
    *on("hsdp", (2, 1)),
    *on("zero3", (2, 2)),
    *on("2-0", (2, 2)),
    *on("zero2", (2, 2)),
    *on("1-2", (2, 2)),
    *on("hfsdp", (1, 2)),
    *on("0-1", (2, 2)),
    *on("3-1", (2, 2)),
]


def some(turn: int) -> list[On]:
    """Where a test runs of which any place shows most; neighbours in the file take turns."""
    return SOME + OTHERS if everything() else SOME + OTHERS[turn::3]


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


@on_meshes(some(0))
def test_evaluation_after_training_twice_in_a_row(rank: int, world_size: int, at: On) -> None:
    """What a step keeps is neither stale nor of the wrong shape: between backward and the optimizer, and after it."""
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


# -- division --------------------------------------------------------------------------------------------------------


class Dot(nn.Module):
    """Its gradient is its input."""

    def __init__(self, numel: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def dot(at: On, reduce: torch.dtype = FP32) -> Any:
    return sw.fully_shard(
        Dot(), mesh=at.mesh, strategy=at.strategy, mp_policy=sw.MixedPrecisionPolicy(reduce_dtype=reduce)
    )


class Division(NamedTuple):
    at: On
    reduce: torch.dtype
    factor: float | None
    force_sum: bool
    micros: int


#: For every strategy and mesh each setting, and each pair of them for some.
DIVISIONS = select(
    [
        Division(at, reduce, factor, force_sum, micros)
        for at, reduce, factor in itertools.product(EVERYWHERE, (FP32, BF16, FP16), (None, 1.0, 6.0))
        for force_sum, micros in ((False, 1), (False, 2), (True, 1))
    ],
    lambda row, strength: together(strength, row.at, row.reduce, row.factor, (row.force_sum, row.micros)),
)


@on_meshes(EVERYWHERE)
def test_gradients_are_divided_once(rank: int, world_size: int, at: On) -> None:
    """Also where axes have one rank. Sums of these values are exact in every dtype; divisions round once or twice."""
    pattern = torch.tensor([1.0, -2.0, 3.0, 0.5, 8.0])
    total = pattern * sum(range(1, world_size + 1))
    for _, reduce, factor, force_sum, micros in [row for row in DIVISIONS if row.at == at]:
        model = dot(at, reduce)
        model.set_force_sum_reduction_for_comms(force_sum)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        for micro in range(micros):
            model.set_is_last_backward(micro == micros - 1)
            model(pattern * (rank + 1)).backward()
        expected = total * micros / (factor or world_size)
        case = f"{reduce}, factor {factor}, {micros} micro-batches"
        tolerance = 1e-6 if reduce is FP32 else 2 * torch.finfo(reduce).eps
        torch.testing.assert_close(
            model.weight.grad.to_local(),
            part_of(expected, model.weight.grad),
            rtol=tolerance,
            atol=0,
            msg=lambda m, c=case: f"{c}: {m}",
        )
    # Four times 20480 is more than float16 holds; the mean is not.
    model = dot(at, FP16)
    model(torch.full((5,), 20480.0)).backward()
    found = model.weight.grad.to_local()
    assert torch.equal(found, torch.full_like(found, 20480.0))


# -- switches --------------------------------------------------------------------------------------------------------


def waits(at: On) -> bool:
    """Whether some reduction is done once per step: over ranks of an axis that keeps whole gradients till then."""
    return any(size > 1 and stage < 2 for size, stage in zip(at.shape, at.stages, strict=True))


@on_meshes([each for each in some(1) if min(each.stages) < 2])
def test_requires_all_reduce(rank: int, world_size: int, at: On) -> None:
    """Per unit; gradients that wait are None, and complete after a backward with True."""
    model = sharded(at)
    for number in range(2):
        model.set_requires_all_reduce(False)
        backward(model, rank, number)
        assert all((p.grad is None) == waits(at) for p in model.parameters())
        backward(model, rank, number, 1)
        model.set_requires_all_reduce(True)
        model.blocks[0].set_requires_all_reduce(False, recurse=False)
        backward(model, rank, number, 2)
        for name, p in model.named_parameters():
            assert (p.grad is None) == (waits(at) and name.startswith("blocks.0.")), name
        model.blocks[0].set_requires_all_reduce(True, recurse=False)
        if waits(at):
            sw.clip_grad_norm_(model.parameters(), 1e9)
        check_gradients(model, expected_gradients(world_size, 3, number))
        model.zero_grad()


@on_meshes(some(2))
def test_all_reduce_hook(rank: int, world_size: int, at: On) -> None:
    """Called once for each unit and complete reduction, with what ``.grad`` becomes; its changes count."""
    model = sharded(at)
    calls: list[tuple[int, torch.Tensor]] = []
    for number, module in enumerate(modules_of(model)):

        def hook(flat: torch.Tensor, number: int = number) -> None:
            calls.append((number, flat.clone()))
            flat.mul_(2.0)

        module.set_all_reduce_hook(hook)
    late = [False, False, True]
    for step in range(2):
        for micro, last in enumerate(late):
            set_micro(model, True, last)
            backward(model, rank, step, micro)
        complete = 1 if waits(at) else 3
        assert sorted(n for n, _ in calls) == sorted([*range(UNITS)] * complete)
        check_gradients(model, [2.0 * g for g in expected_gradients(world_size, 3, step)])
        if complete == 1:
            for number, flat in calls:
                assert flat.ndim == 1 and flat.dtype == FP32
                gradients = [p.sharded.grad.to_local().flatten() for p in units_of(model)[number].parameters]
                mine = torch.cat(gradients) / 2.0
                torch.testing.assert_close(flat.norm(), mine.norm())
                torch.testing.assert_close(
                    flat.sort()[0][flat.sort()[0] != 0], mine.sort()[0][mine.sort()[0] != 0]
                )
        calls.clear()
        model.zero_grad()


@on_meshes(some(0))
def test_a_hook_that_clears_gradients_leaves_zeros(rank: int, world_size: int, at: On) -> None:
    torch.manual_seed(0)
    model = Branches().shard(at)
    model.set_all_reduce_hook(lambda flat: flat.zero_())
    model(torch.randn(2, 5), rank == 0).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and not p.grad.to_local().any(), name


@on_meshes(some(1))
def test_other_groups_and_more_buffers_change_no_bit(rank: int, world_size: int, at: On) -> None:
    gradients = []
    for switch in ("none", "group", "buffers"):
        model = sharded(at)
        if switch == "group":
            model.set_separate_reduce_scatter_group()
        if switch == "buffers":
            model.set_reduce_scatter_max_input_buffers(2)
        for step in range(2):
            for micro in range(2):
                set_micro(model, True, micro == 1)
                backward(model, rank, step, micro)
        gradients.append([p.grad.to_local() for p in model.parameters()])
    for usual, *others in zip(*gradients, strict=True):
        assert all(torch.equal(usual, other) for other in others)


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
        ({"mesh": line, "strategy": "fsdp"}, "ddp, zero1, zero2, zero3, hsdp, hfsdp, got 'fsdp'"),
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


# -- exceptions, unused parameters, divergence -----------------------------------------------------------------------


@on_meshes(some(2))
def test_training_goes_on_after_an_exception(rank: int, world_size: int, at: On) -> None:
    """With sums held: a failed forward is repeated, a failed backward given up with its step."""
    os.environ["SHARDWRIGHT_POISON"] = "1"

    class Boom(BaseException):  # as KeyboardInterrupt is
        pass

    def fail(*_: object) -> None:
        raise Boom

    model = sharded(at)
    for step, sync in enumerate((True, False)):
        expected = expected_gradients(world_size, 3, step)
        set_micro(model, sync, False)
        backward(model, rank, step, 0)
        for failing_micro_is_last in (False, True):
            set_micro(model, True, failing_micro_is_last)
            handle = model.blocks[1].up.register_forward_hook(fail)
            with pytest.raises(Boom):
                backward(model, rank, step, 1)
            handle.remove()
        set_micro(model, True, False)
        backward(model, rank, step, 1)
        set_micro(model, True, True)
        backward(model, rank, step, 2)
        check_gradients(model, expected)
        model.zero_grad()
        for failing_micro_is_last in (False, True):
            set_micro(model, sync, False)
            backward(model, rank, step, 0)
            set_micro(model, True, failing_micro_is_last)
            handle = model.blocks[0].up.register_full_backward_hook(fail)
            with pytest.raises(Boom):
                backward(model, rank, step, 1)
            handle.remove()
            model.zero_grad()
            for micro in range(3):
                set_micro(model, True, micro == 2)
                backward(model, rank, step, micro)
            check_gradients(model, expected)
            model.zero_grad()


class Branches(nn.Module):
    """The second layer is used if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.maybe = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = torch.tanh(self.always(x))
        return (x.square().sum() + self.maybe(x).square().sum()) if both else x.square().sum()

    def shard(self, at: On) -> Any:
        return sw.fully_shard(self, mesh=at.mesh, strategy=at.strategy)


@on_meshes(some(0))
def test_parameters_unused_on_some_ranks(rank: int, world_size: int, at: On) -> None:
    """Zeros where others have gradients, None where nobody has: over ranks of all axes and all micro-batches."""
    os.environ["SHARDWRIGHT_POISON"] = "1"
    torch.manual_seed(0)
    plain = Branches()
    model = Branches()
    model.load_state_dict(plain.state_dict())
    model.shard(at)
    everyone = set(range(world_size))
    micro_users: list[list[set[int]]] = [
        [everyone],
        [set()],
        [{0}],
        [{world_size - 1}],
        [everyone - {0}],
        [{0, 1}],
        [set(), {0}],
        [{world_size - 1}, set()],
        [{0}, everyone, set()],
        [set(), set()],
    ]
    for step, users in enumerate(micro_users):
        for micro, using in enumerate(users):
            x = [
                torch.randn(2, 5, generator=torch.Generator().manual_seed(step * 99 + micro * 9 + r))
                for r in everyone
            ]
            set_micro(model, True, micro == len(users) - 1)
            model(x[rank], rank in using).backward()
            for r in everyone:
                (plain(x[r], r in using) / world_size).backward()
        check_gradients(model, [p.grad for p in plain.parameters()])
        for one in (model, plain):
            one.zero_grad()


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor, part: str) -> torch.Tensor:
        return self.parts[part](x)


@on_meshes([each for each in some(1) if each.shape[0] == 2])
def test_replicas_that_diverge_are_named(rank: int, world_size: int, at: On) -> None:
    """The first half of the ranks runs another unit than the second: where they meet, both are named."""
    torch.manual_seed(0)
    model = Choice()
    for module in (*model.parts.values(), model):
        sw.fully_shard(module, mesh=at.mesh, strategy=at.strategy)
    half = world_size // 2
    one, other = rank % half, rank % half + half
    gathers = r"gathers unit 1 \('parts.a'\); rank {} gathers unit 2 \('parts.b'\)"
    reduces = r"reduces the gradients of unit 1 \('parts.a'\); rank {} reduces the gradients of unit 2 \('parts.b'\)"
    told = gathers if at.stages[0] else reduces
    with pytest.raises(RuntimeError, match=f"The ranks have diverged: rank {one} " + told.format(other)):
        model(torch.randn(1, 4), "ab"[rank >= half]).sum().backward()


# -- counted: collectives --------------------------------------------------------------------------------------------


THREE = [(True, True)] * 3
THREE_LATE = [(True, False), (True, False), (True, True)]
THREE_HELD = [(False, True), (False, True), (True, True)]
#: For each unit and step: all-gathers, reduce-scatters, all-reduces.
COLLECTIVES = [
    (at, name, *numbers)
    for strategy, shape, name, *numbers in [
        ("zero3", (2,), "single", 2, 1, 0),
        ("zero3", (3,), "late", 6, 3, 0),
        ("zero3", (2,), "hold", 6, 1, 0),
        ("zero2", (2,), "single", 1, 1, 0),
        ("zero2", (3,), "late", 1, 3, 0),
        ("zero2", (2,), "hold", 1, 1, 0),
        ("zero1", (2,), "single", 1, 1, 0),
        ("zero1", (3,), "late", 1, 1, 0),
        ("zero1", (2,), "hold", 1, 1, 0),
        ("ddp", (2,), "single", 0, 0, 1),
        ("ddp", (3,), "late", 0, 0, 1),
        ("ddp", (2,), "each", 0, 0, 3),
        ("ddp", (1,), "each", 0, 0, 0),
        ("hsdp", (2, 2), "single", 2, 1, 1),
        ("hsdp", (2, 2), "late", 6, 3, 1),
        ("hsdp", (2, 2), "each", 6, 3, 3),
        ("hsdp", (2, 2), "hold", 6, 1, 1),
        ("hsdp", (1, 2), "late", 6, 3, 0),
        ("hsdp", (2, 1), "late", 0, 0, 1),
        ("0-2", (2, 2), "late", 1, 3, 1),
        ("0-1", (2, 2), "late", 1, 1, 1),
        ("0-1", (2, 2), "each", 1, 3, 3),
        ("3-0", (2, 2), "late", 6, 3, 1),
        # Over two axes: the outer gather fills a copy that lasts for the step, the outer reduce-scatter ends it.
        ("hfsdp", (2, 2), "single", 3, 2, 0),
        ("hfsdp", (2, 2), "late", 7, 4, 0),
        ("hfsdp", (1, 2), "late", 6, 3, 0),
        ("hfsdp", (2, 1), "late", 1, 1, 0),
        ("hfsdp", (2, 2), "each", 7, 6, 0),
        ("zero1", (2, 2), "late", 2, 2, 0),
        ("zero2", (2, 2), "late", 2, 6, 0),
        ("zero3", (2, 2), "late", 12, 6, 0),
        ("1-2", (2, 2), "late", 2, 4, 0),
        ("2-3", (2, 2), "late", 7, 6, 0),
        ("3-1", (2, 2), "late", 7, 4, 0),
        ("3-2", (2, 2), "single", 3, 2, 0),
    ]
    for at in on(strategy, shape)
]


@on_meshes(COLLECTIVES)
def test_collectives_per_unit_and_step(
    rank: int, world_size: int, at: On, micros: str, gathers: int, scatters: int, reductions: int
) -> None:
    model = sharded(at, reshard_after_forward=True if True in at.reshards else None)
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    plan = {"single": [(True, True)], "each": THREE, "late": THREE_LATE, "hold": THREE_HELD}[micros]
    for step in range(2):
        with counted() as seen:
            for micro, flags in enumerate(plan):
                set_micro(model, *flags)
                backward(model, rank, step, micro)
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found = {kind: seen[kind] / UNITS for kind in ("all_gather", "reduce_scatter", "all_reduce")}
        assert found == {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": reductions}


@on_meshes(on("hsdp", (2, 2)))
def test_without_all_reduce_nothing_crosses_the_outer_axis(rank: int, world_size: int, at: On) -> None:
    model = sharded(at)
    with counted() as seen:
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            backward(model, rank, 0, micro)
    assert (seen["reduce_scatter"], seen["all_reduce"]) == (3 * UNITS, UNITS)


@on_meshes([*on("hsdp", (2, 2)), *on("0-2", (2, 2)), *on("hfsdp", (2, 2))])
def test_what_crosses_the_outer_axis_overlaps_with_the_next_units(rank: int, world_size: int, at: On) -> None:
    """It is awaited only after the next unit's gather and reduce-scatter were issued, and one is under way at most."""
    model = sharded(at, reshard_after_forward=True if True in at.reshards else None)
    backward(model, rank)
    model.zero_grad()
    log: list[tuple[str, int]] = []
    numbers: dict[int, tuple[str, int]] = {}
    seen: Counter[str] = Counter()
    originals = {name: getattr(Communicator, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    wait = Pending.wait
    outer = {comm for unit in units_of(model) for comm in (*unit.ranks.replicas, *unit.ranks.late)}

    def issuing(name: str) -> Callable[..., Any]:
        def method(self: Communicator, *args: Any, **kwargs: Any) -> Any:
            kind = "outer" if self in outer and name != "all_gather" else name
            log.append((f"issue {kind}", seen[kind]))
            pending = originals[name](self, *args, **kwargs)
            numbers[id(pending)] = (kind, seen[kind])
            kept.append(pending)
            seen[kind] += 1
            return pending

        return method

    def waiting(self: Pending) -> None:
        if id(self) in numbers:
            kind, number = numbers.pop(id(self))
            log.append((f"wait {kind}", number))
        wait(self)

    kept: list[Pending] = []  # so that ids stay theirs
    batch = tokens(0, 0, rank)
    loss = loss_of(model(batch), batch)
    try:
        for name in originals:
            setattr(Communicator, name, issuing(name))
        Pending.wait = waiting  # type: ignore[method-assign]
        loss.backward()
    finally:
        Pending.wait = wait  # type: ignore[method-assign]
        for name, original in originals.items():
            setattr(Communicator, name, original)
    place = {event: i for i, event in enumerate(log)}
    assert seen["outer"] == UNITS == seen["reduce_scatter"]
    for n in range(UNITS - 2):
        # Unit n's sum crosses while unit n + 1 is reduced and unit n + 2 computes.
        assert place["issue outer", n] < place["issue reduce_scatter", n + 1] < place["wait outer", n], log
        assert place["wait outer", n] < place["issue outer", n + 1], log
    check_gradients(model, expected_gradients(world_size))


# -- counted: bytes --------------------------------------------------------------------------------------------------


def storages() -> dict[int, int]:
    """Bytes of every memory that a tensor of this process stands on, by address."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and type(thing) is not DTensor:
            storage = local_of(thing).untyped_storage()
            with suppress(RuntimeError):  # a subclass around other tensors has no memory
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def nbytes_on(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


RAGGED: list[sw.Ragged] = [sw.Ragged("row"), sw.Ragged(2), sw.Ragged("element")]
AT_REST = select(
    list(itertools.product(EVERYWHERE, (FP32, BF16), ["per_parameter", *RAGGED])),
    lambda row, strength: together(strength, row[0].stages[:-1], row[0].stages[-1], row[0].shape, *row[1:]),
)


def numbers_at_rest(
    model: nn.Module, at: On, storage: torch.dtype, layout: str | sw.Ragged
) -> tuple[int, int, int]:
    """Bytes of parameters and of moments by arithmetic, and elements of padding in the unit that has most."""
    plain = build()
    parameters = states = gaps = 0
    if not isinstance(layout, sw.Ragged):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            row = q[0].numel() * storage.itemsize
            parameters += -(-len(q) // at.parts) * row
            states += 2 * len(part_of(q, p)) * row
        return parameters, states, gaps
    last = [*plain.norm.parameters(), *plain.head.parameters()]
    for unit in ([plain.embed.weight], *(list(block.parameters()) for block in plain.blocks), last):
        planned = sw.layout.plan([p.shape for p in unit], at.parts, layout, dtypes=[storage] * len(unit))
        parameters += sum(segment.chunk for segment in planned.segments) * storage.itemsize
        owned = planned.owned(units_of(model)[0].ranks.part)
        states += 2 * sum(stop - start for _, start, stop in owned) * storage.itemsize
        gaps = max(gaps, planned.numel - sum(p.numel() for p in unit))
    return parameters, states, gaps


@on_meshes(AT_REST)
def test_bytes_at_rest(
    rank: int, world_size: int, at: On, storage: torch.dtype, layout: str | sw.Ragged
) -> None:
    """Parameters: ceil(rows / parts) rows each, in ragged layouts what `plan` says of the shapes alone, padding
    included. AdamW: twice what the rank owns of them.

    Nothing else but tables of a few numbers for each parameter is alive: no gathered copy, no gradient, no buffer. Of
    the padding that ragged segments have on all ranks zeros are kept, once for all units.
    """
    before = storages()
    model = sharded(at, build().to(storage), layout=layout)
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    for step in range(2):
        for micro, flags in enumerate(THREE_LATE):
            set_micro(model, *flags)
            backward(model, rank, step, micro)
        optimizer.step()
        optimizer.zero_grad()
    parameters, states, gaps = numbers_at_rest(model, at, storage, layout)
    locals_ = [local_of(p) for p in model.parameters()]
    assert nbytes_on(locals_) == parameters
    moments = [local_of(s[key]) for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert sum(t.numel() * t.element_size() for t in moments) == states == nbytes_on(moments)
    if storage is FP32:
        others = {a: n for a, n in storages().items() if before.get(a) != n}
        ours = {t.untyped_storage().data_ptr() for t in [*moments, *locals_]}
        rest = sum(n for a, n in others.items() if a not in ours)
        count = len(list(model.parameters()))
        # Padding between packed gradients and a flag (16 bytes each at least) for each part, a step for each state.
        tables = count * (2 * 16 * at.parts * 2 + 64) + UNITS * 64 * (at.parts + 1)
        assert rest <= tables + 4 * gaps, rest


@on_meshes(on("zero3", (4,)))
def test_padding_of_all_ranks_is_kept_once(rank: int, world_size: int, at: On) -> None:
    """A block of 32 rows is not cut, so one rank has all of a small matrix and three have none: 960 zeros to reduce."""
    before = storages()
    model = nn.Sequential(*[nn.Linear(64, 5, bias=False) for _ in range(8)])
    for layer in model:
        sw.fully_shard(layer, mesh=at.mesh, layout=sw.Ragged(32))
    unit = units_of(model)[0]
    assert sw.layout.plan([(5, 64)], 4, sw.Ragged(32)).padding == 3.0
    assert [shard.numel() for shard in unit.shards] == [320]
    after = storages()
    found = sum(n for a, n in after.items() if before.get(a) != n)
    assert found <= 8 * 320 * 4 + 960 * 4 + 8 * 512, found
