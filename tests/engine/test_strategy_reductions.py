"""How strategies reduce gradients: division, switches and hooks, after an exception, and where ranks differ."""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.places import On, on_meshes
from tests.engine.kit.strategies import EVERYWHERE, some
from tests.engine.kit.training import (
    BF16,
    FP16,
    FP32,
    UNITS,
    backward,
    check_gradients,
    expected_gradients,
    modules_of,
    part_of,
    set_micro,
    sharded,
    units_of,
)
from tests.support.matrix import select, together

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


@pytest.mark.extensive("each mesh", but=("*@2x2", "*@2", "*@3"))
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


@pytest.mark.extensive("each strategy", but=("zero3@2", "hsdp@2x2", "zero1@2"))
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


@pytest.mark.extensive("each strategy", but=("hsdp@2x2", "zero2@3", "zero3@2", "ddp@2"))
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


# -- exceptions, unused parameters, divergence -----------------------------------------------------------------------


@pytest.mark.extensive("each place", but=("zero3@2", "hsdp@2x2", "zero2@3", "ddp@2", "hfsdp@2x1", "zero1@2"))
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
