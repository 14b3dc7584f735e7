"""Optimizers that need whole tensors: the bits of one device, each tensor stepped once in the world by its owner."""

from __future__ import annotations

import copy
import itertools
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardwright as sw
from shardwright.optim.companion import sharded_companion
from shardwright.optim.whole import plan
from tests.engine.kit.models import full
from tests.optim.kit import OPTIMIZERS
from tests.optim.whole import LAYOUTS, STRATEGIES, Odd, Whole, assert_equal_bits, set_gradients, twins
from tests.support import multirank, world_mesh

each_alone = patch.object(plan, "SMALLEST_ROUND", 1)


def steps_equal(world_size: int, name: str, strategy: str, layout: str, dtype: torch.dtype) -> None:
    plain, sharded = twins(world_size, strategy, layout, others=name != "torch-Muon", dtype=dtype)
    expected = OPTIMIZERS[name](plain)
    ours = sw.fully_shard_optimizer(OPTIMIZERS[name](sharded))
    for step in range(3):
        set_gradients(plain, sharded, step=step, without="tall" if step == 1 else "")
        expected.step()
        ours.step()
        ours.zero_grad()
        expected.zero_grad()
        assert_equal_bits(plain, sharded, f"{strategy}, {layout}, step {step}")


@multirank(1, 2, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_one_device(rank: int, world_size: int, name: str) -> None:
    for strategy, layout in itertools.product(("zero3", "zero1", "ddp"), LAYOUTS):
        dtype = torch.bfloat16 if (strategy, layout) == ("zero3", "element") else torch.float32
        with each_alone if strategy == "zero3" else nullcontext():  # in a round of its own, or all in one
            steps_equal(world_size, name, strategy, layout, dtype)


@pytest.mark.extensive("each optimizer")
@multirank(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_one_device_over_two_axes(rank: int, world_size: int, name: str) -> None:
    for strategy, layout in itertools.product(("hsdp", "hfsdp"), LAYOUTS):
        steps_equal(world_size, name, strategy, layout, torch.float32)


def pair(world_size: int, strategy: str = "zero3", **options: Any) -> tuple[Any, Any, Any, Any]:
    plain, sharded = twins(world_size, strategy, "row", others=True)
    expected = Whole(plain.parameters(), **options)
    return plain, expected, sharded, sw.fully_shard_optimizer(Whole(sharded.parameters(), **options))


def gathered(value: Any, world_size: int) -> list[Any]:
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, value)
    return everyone


@multirank(2, 4)
@pytest.mark.parametrize("strategy", ["zero3", "ddp", "hsdp"])
@each_alone
def test_each_matrix_is_stepped_once_in_the_world(rank: int, world_size: int, strategy: str) -> None:
    plain, expected, sharded, ours = pair(world_size, strategy)
    for step in range(2):
        set_gradients(plain, sharded, step=step)
        expected.step()
        ours.step()
    assert_equal_bits(plain, sharded)
    matrices = [p.shape for p in plain.parameters() if p.ndim == 2]
    stepped = [
        shape
        for log in gathered(ours.log, world_size)
        for shape in log
        if len(shape) == 2 and shape in matrices
    ]
    seen = {shape: stepped.count(shape) for shape in matrices}
    assert seen == dict.fromkeys(matrices, 2)


@multirank(4)
@pytest.mark.parametrize("strategy", ["zero3", "ddp", "hsdp", "hfsdp"])
@pytest.mark.parametrize(
    ("kind", "dtype", "to_owner", "back"),
    [
        (torch.optim.Muon, torch.float32, 4, 2),  # the gradient; the update in bfloat16
        (sw.Muon, torch.float64, 8, 2),
        (torch.optim.Muon, torch.bfloat16, 2 + 2, 2),  # stepped whole: gradient and values; values
        (torch.optim.Adafactor, torch.float32, 4 + 4, 4),
    ],
)
def test_bytes_moved(
    rank: int, world_size: int, kind: Any, dtype: torch.dtype, to_owner: int, back: int, strategy: str
) -> None:
    """As docs/optimizers.md has them, of matrices that divide evenly; and nobody sends to itself.

    Fewer are impossible: the owner needs each gradient that it does not have once, each other rank its part once.
    """
    shape, name = STRATEGIES[strategy]
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(4))).to(dtype)
    sw.fully_shard(model, mesh=world_mesh(*shape(world_size)), strategy=name)
    parameters = model.named_parameters() if kind is sw.Muon else model.parameters()
    optimizer = sw.fully_shard_optimizer(kind(parameters))
    sent = []

    def spy(into: Any, out: Any, receive: Any, send: Any, **options: Any) -> Any:
        assert send[rank] == 0
        sent.append(sum(send))
        return all_to_all(into, out, receive, send, **options)

    set_gradients(model, step=0)
    all_to_all = torch.distributed.all_to_all_single
    with patch.object(torch.distributed, "all_to_all_single", spy):
        optimizer.step()
    shards = {"zero3": 4, "ddp": 1, "hsdp": 2, "hfsdp": 4}[strategy]
    expected = 4 * 256 * (to_owner * (shards - 1) + back * (world_size - 1)) // shards
    assert sum(sum(part) for part in gathered(sent, world_size)) == expected


@multirank(2)
@each_alone
def test_moves_overlap_with_arithmetic(rank: int, world_size: int) -> None:
    """While a round is stepped, the tensors of the next are on their way, and the results of the one before."""
    plain, _, sharded, ours = pair(world_size)
    under_way, during_steps = [], []
    all_to_all = torch.distributed.all_to_all_single

    class Work:
        def __init__(self, work: Any) -> None:
            self.work = work
            under_way.append(self)

        def wait(self) -> None:
            under_way.remove(self)
            self.work.wait()

    class Log:
        def append(self, shape: torch.Size) -> None:
            during_steps.append(len(under_way))

    ours.log = Log()
    set_gradients(plain, sharded, step=0)
    with patch.object(torch.distributed, "all_to_all_single", lambda *a, **k: Work(all_to_all(*a, **k))):
        ours.step()
    assert len(during_steps) >= 3 and not under_way
    # Rounds whose tensors their owners hold anyway need no move there.
    assert min(during_steps) == 1 and max(during_steps) == 2


@multirank(2)
@each_alone
def test_what_a_step_counts_is_counted_once(rank: int, world_size: int) -> None:
    """However many rounds there are: in groups, in attributes, by hooks, in state of every kind."""
    plain, expected, sharded, ours = pair(world_size)
    hooks = []
    ours.register_step_pre_hook(lambda *_: hooks.append("pre"))
    ours.register_step_post_hook(lambda *_: hooks.append("post"))
    for step in range(3):
        set_gradients(plain, sharded, step=step)
        expected.step()
        ours.step()
        assert_equal_bits(plain, sharded)
        for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
            want, have = expected.state[p], ours.state[q]
            assert list(have) == list(want)
            assert (have["calls"], have["kind"], have["nested"]["old"]) == (step + 1, "whole", step % 2 == 1)
            assert torch.equal(full(have["step"]), want["step"])
            assert torch.equal(full(have["nested"]["sums"][0]), want["nested"]["sums"][0])
    assert ours.param_groups[0]["count"] == ours.steps == 3 and hooks == ["pre", "post"] * 3


@multirank(3)
def test_groups_closures_schedulers_and_frozen_parameters(rank: int, world_size: int) -> None:
    plain, sharded = twins(world_size, others=True)
    optimizers = []
    for model in (plain, sharded):
        groups = [{"params": [model.wide, model.vector], "lr": 0.3}, {"params": [model.tall, model.row]}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, maximize=True)
        if model is sharded:
            optimizer = sw.fully_shard_optimizer(optimizer, needs=lambda p: "tensor" if p.ndim == 2 else 1)
        optimizers.append((model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)))
    for step in range(4):
        for model, optimizer, schedule in optimizers:
            if step == 2:
                model.wide.requires_grad_(False)
                optimizer.add_param_group({"params": [model.cube, model.embed, model.even], "lr": 0.7})
                schedule.base_lrs.append(0.7)

            def closure(model: Any = model, step: int = step) -> float:
                set_gradients(model, step=step, without="wide" if step >= 2 else "")
                return 5.0

            assert optimizer.step(closure) == 5.0
            schedule.step()
        assert_equal_bits(plain, sharded, f"step {step}")


@multirank(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_built_before_its_model_was_sharded(rank: int, world_size: int, name: str) -> None:
    """``shard_needs`` is asked about parameters that have taken the place of those that it was built on."""
    plain, ours = Odd(others=name != "torch-Muon"), Odd(others=name != "torch-Muon")
    expected, optimizer = OPTIMIZERS[name](plain), OPTIMIZERS[name](ours)
    sw.fully_shard(ours, mesh=world_mesh(world_size))
    sw.fully_shard_optimizer(optimizer)
    for step in range(2):
        set_gradients(plain, ours, step=step)
        expected.step()
        optimizer.step()
        assert_equal_bits(plain, ours, f"step {step}")


@multirank(2)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "Whole"])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_model_sharded_later_leaves_owners_of_earlier_parameters(
    rank: int, world_size: int, name: str, stepped: bool
) -> None:
    """``fully_shard_optimizer`` is called again: each parameter has one owner, and is stepped once."""
    make = OPTIMIZERS.get(name, lambda model: Whole(model.parameters()))
    plain, ours = (torch.nn.ModuleDict({"first": Odd(), "second": Odd()}) for _ in range(2))
    expected, optimizer = make(plain), make(ours)
    sw.fully_shard(ours["first"], mesh=world_mesh(world_size))
    sw.fully_shard_optimizer(optimizer)
    for step in range(3):
        if step == stepped:
            sw.fully_shard(ours["second"], mesh=world_mesh(world_size), layout="ragged")
            assert sw.fully_shard_optimizer(optimizer) is optimizer
        set_gradients(plain, ours, step=step)
        expected.step()
        optimizer.step()
        assert_equal_bits(plain, ours, f"step {step}")
    owned = [o.p for owners in sharded_companion(optimizer).owners.values() for o in owners.owned]
    assert len(owned) == len(set(owned)) == len(list(ours.parameters()))


@multirank(2)
def test_plain_parameters_and_two_models_on_other_meshes(rank: int, world_size: int) -> None:
    plain, sharded = twins(world_size, others=True)
    again, replicated = twins(world_size, "hsdp", others=True)
    outside = [torch.nn.Parameter(torch.eye(3)) for _ in range(2)]
    expected = Whole([*plain.parameters(), *again.parameters(), outside[0]])
    ours = sw.fully_shard_optimizer(Whole([*sharded.parameters(), *replicated.parameters(), outside[1]]))
    for step in range(2):
        set_gradients(plain, sharded, step=step)
        set_gradients(again, replicated, step=step + 10)
        for p in outside:
            p.grad = torch.full((3, 3), 1.0 + step)
        expected.step()
        ours.step()
    assert_equal_bits(plain, sharded)
    assert_equal_bits(again, replicated)
    assert torch.equal(*outside)


@multirank(2, 3)
@each_alone
def test_an_error_on_an_owner_is_raised_on_every_rank(rank: int, world_size: int) -> None:
    plain, expected, sharded, ours = pair(world_size)
    set_gradients(plain, sharded, step=0)
    expected.step()
    ours.step()
    failing, state = plain.tall.shape, list(ours.state)
    ours.fails_on = failing
    set_gradients(plain, sharded, step=1)
    with pytest.raises((KeyError, RuntimeError)) as caught:
        ours.step()
    ours.fails_on = None
    kinds = gathered(caught.type.__name__, world_size)
    assert kinds.count("KeyError") == 1 and kinds.count("RuntimeError") == world_size - 1
    if caught.type is RuntimeError:
        message = (
            f"step failed on rank {kinds.index('KeyError')}, on whole tensors, the first is 'tall of Odd'"
        )
        assert message in str(caught.value)
    assert ours.param_groups[0]["params"] == list(sharded.parameters()) and list(ours.state) == state
    assert all(p.grad is not None for p in sharded.parameters())
    # What was not stepped is as before on every rank, what was is as it should be; so training can go on.
    expected.step()
    untouched, done = copy.deepcopy(Odd(others=True)), dict(plain.named_parameters())
    before = Whole(untouched.parameters())
    set_gradients(untouched, step=0)
    before.step()
    for name, p in untouched.named_parameters():
        value = full(sharded.get_parameter(name))
        assert torch.equal(value, p) or torch.equal(value, done[name])
        if p.shape == failing:
            assert torch.equal(value, p)
    set_gradients(sharded, step=2)
    ours.step()


@multirank(2)
def test_gradients_that_only_some_ranks_have(rank: int, world_size: int) -> None:
    plain, expected, sharded, ours = pair(world_size)
    set_gradients(sharded, step=0, without="row" if rank == 1 else "")
    with pytest.raises(
        RuntimeError,
        match=r"parameter 'row of Odd' on every rank or on none; ranks \[0\] have one, the other ranks",
    ):
        ours.step()
    set_gradients(plain, sharded, step=0)
    expected.step()
    ours.step()
    assert_equal_bits(plain, sharded)


@multirank(4)
def test_tensors_that_others_have_sharded(rank: int, world_size: int) -> None:
    mesh = world_mesh(2, 2)
    whole = torch.arange(20.0).view(4, 5)
    right = torch.nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(1)]))
    wrong = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Shard(1)]))
    optimizer = Whole([right, wrong])
    with pytest.raises(ValueError, match=r"shape \(4, 5\)' whole. It is expected .* found \(Shard"):
        sw.fully_shard_optimizer(optimizer)
    assert type(optimizer) is Whole
    optimizer, plain = sw.fully_shard_optimizer(Whole([right])), torch.nn.Parameter(whole.clone())
    expected = Whole([plain])
    with pytest.raises(ValueError, match=r"No rank can step parameter"):
        optimizer.add_param_group({"params": [wrong]})
    for step in range(2):
        plain.grad = torch.full((4, 5), 1.0 + step)
        right.grad = distribute_tensor(plain.grad, mesh, right.placements)
        optimizer.step()
        expected.step()
        assert torch.equal(right.full_tensor(), plain)


@given(st.lists(st.floats(0, 1e9), max_size=60), st.integers(1, 64))
def test_balance(costs: list[float], ranks: int) -> None:
    loads = [0.0] * ranks
    owners = plan.balance(costs, loads)
    found = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(ranks)]
    assert found == pytest.approx(loads)
    # Graham's bound, against what no assignment can beat.
    least = max(
        [sum(costs) / ranks, *costs, *(sorted(costs)[-ranks - 1 :][:1] * 2 if len(costs) > ranks else ())]
    )
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0.0) * (1 + 1e-9)
    assert least <= max(loads) * (1 + 1e-9)


@multirank(4)
def test_matrices_of_a_model_are_balanced(rank: int, world_size: int) -> None:
    """By the cost of Newton-Schulz, over all ranks of the mesh, replicas included."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8 * (1 + i % 3), 8 * (1 + (i + 1) % 3)) for i in range(12)))
    sw.fully_shard(model, mesh=world_mesh(2, 2))
    optimizer = sw.fully_shard_optimizer(sw.Muon(model.named_parameters()))
    (owners,) = sharded_companion(optimizer).owners.values()
    loads = [sum(o.cost for o in owners.owned if o.owner == rank) for rank in range(4)]
    assert len(owners.owned) == 12 and max(loads) <= 1.1 * sum(loads) / 4
    assert {o.cost for o in owners.owned} == {8 * 16 * 8.0, 16 * 24 * 16.0, 24 * 8 * 8.0}


def test_rounds_are_bounded() -> None:
    generator = random.Random(0)
    items = [
        plan.WholePiece(i, generator.randrange(5), generator.random(), SimpleNamespace(total=generator.randrange(1, 9)),
                   torch.Size(), torch.float32, torch.bfloat16)
        for i in range(200)
    ]  # fmt: skip
    for limit in (1, 20, 100, 10**6):
        with patch.multiple(plan, SMALLEST_ROUND=limit, LARGEST_ROUND=limit):
            rounds = plan.in_rounds(items)
        assert sorted(item.key for one in rounds for item in one) == list(range(200))
        for one in rounds:
            for owner in range(5):
                mine = [item.nbytes for item in one if item.owner == owner]
                assert sum(mine) <= limit or len(mine) == 1
