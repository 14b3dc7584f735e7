"""Ranks that make different numbers of optimizer steps are named, with their counts, before their weights meet."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.engine import UNIT
from tests.engine.kit.models import full, shard_layers, three_layers
from tests.support import multirank, world_mesh
from tests.support.stand_in import stand_in_device

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank))


def backward(model: Any, rank: int, number: int) -> None:
    model(batch(rank, number)).square().mean().backward()


def ages(one: int, other: int, *ranks: str) -> Any:
    """An error that names ranks and their numbers of steps."""
    first, second = ranks or ("rank 0", "rank 1")
    steps = [f"{n} optimizer step" + ("" if n == 1 else "s") for n in (one, other)]
    return pytest.raises(
        RuntimeError,
        match=rf"diverged: {first} \w+ [^;]* after {steps[0]}; {second} \w+ [^;]* after {steps[1]}\. Some ranks have",
    )


MakeOptimizer = Callable[[Any], Any]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "wrapped": lambda model: sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2)),
    "torch's": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
}


@multirank(2, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_skips_a_step(rank: int, world_size: int, strategy: str) -> None:
    """As after a loss that is not finite. Without an error weights of different ages would meet."""
    last = world_size - 1
    others = "rank 0" if world_size == 2 else "ranks 0, 1"
    for make in OPTIMIZERS.values():
        model = shard_layers(three_layers(), strategy=strategy)
        optimizer = make(model)
        for number in range(4):
            backward(model, rank, number)
            if number != 3 or rank != last:
                optimizer.step()
            optimizer.zero_grad()
        with ages(4, 3, others, f"rank {last}"):
            backward(model, rank, 4)
        with ages(4, 3, others, f"rank {last}"), torch.no_grad():  # it is not forgotten
            model(batch(rank, 4))


@multirank(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_numbers_of_micro_batches(rank: int, world_size: int, strategy: str) -> None:
    """All make as many forwards and backwards; their steps fall between others."""
    model = shard_layers(three_layers(), strategy=strategy)
    optimizer = OPTIMIZERS["wrapped"](model)
    with ages(1, 0):
        for number in range(1, 7):
            backward(model, rank, number)
            if number % (2 + rank) == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert number == 3


@multirank(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_micro_batch_more_before_the_same_step(rank: int, world_size: int, strategy: str) -> None:
    """Rank 1 holds one micro-batch less: it reduces where rank 0 goes on. The error says what each does."""
    model = shard_layers(three_layers(), strategy=strategy)
    with pytest.raises(RuntimeError, match=r"diverged: .*rank"):
        for number in range(3 - rank):
            model.set_requires_gradient_sync(number == 2 - rank)
            backward(model, rank, number)
        model(batch(rank, 9))


@multirank(4)
def test_on_a_mesh_of_two_dimensions(rank: int, world_size: int) -> None:
    """The replicas agree among themselves, and not with each other."""
    model = shard_layers(three_layers(), strategy="hsdp", mesh=world_mesh(2, 2))
    optimizer = OPTIMIZERS["wrapped"](model)
    backward(model, rank, 0)
    if rank < 2:
        optimizer.step()
    optimizer.zero_grad()
    with ages(1, 0, f"rank {rank % 2}", f"rank {rank % 2 + 2}"):
        backward(model, rank, 1)


@multirank(2)
def test_steps_in_backward(rank: int, world_size: int) -> None:
    """A step of sw.optim.in_backward counts at the end of backward; so does a step in parameters' hooks."""
    model = shard_layers(three_layers())
    optimizer = sw.optim.in_backward(torch.optim.SGD(model.parameters(), lr=1e-2))
    extra = nn.Parameter(torch.ones(2))  # a plain one, of which only one rank has a gradient
    optimizer.add_param_group({"params": [extra]})
    for number in range(3):
        backward(model, rank, number)
        extra.grad = torch.ones(2) if rank == 0 else None
        optimizer.step()
    model.set_is_last_backward(rank == 0)  # rank 1 steps nothing
    with ages(4, 3):
        backward(model, rank, 3)

    model = shard_layers(three_layers())
    skips: list[bool] = []
    for p in model.parameters():
        alone = torch.optim.SGD([p], lr=1e-2)
        p.register_post_accumulate_grad_hook(lambda _, alone=alone: None if skips else alone.step())
    backward(model, rank, 0)
    backward(model, rank, 1)
    if rank == 1:
        skips.append(True)
    with ages(18, 12):  # one for each parameter
        backward(model, rank, 2)


@multirank(2)
def test_a_step_that_fails_does_not_count(rank: int, world_size: int) -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if failing:
                raise ArithmeticError("as the test asked for")
            return super().step(closure)

    for make in (lambda o: o, lambda o: sw.fully_shard_optimizer(o, needs=1)):
        failing = False
        model = shard_layers(three_layers())
        optimizer = make(Fails(model.parameters(), lr=1e-2))
        backward(model, rank, 0)
        failing = rank == 0
        try:
            optimizer.step()
        except ArithmeticError:
            assert rank == 0
        with ages(0, 1):
            backward(model, rank, 1)


@multirank(2)
def test_a_state_dict_makes_ranks_equal_again(rank: int, world_size: int) -> None:
    """Training goes on from it as the plain model's training does."""
    plain = three_layers()
    model = shard_layers(plain)
    optimizer = OPTIMIZERS["torch's"](model)
    backward(model, rank, 0)
    if rank:
        optimizer.step()
    with ages(0, 1):
        backward(model, rank, 1)
    model.zero_grad()
    model.load_state_dict(plain.state_dict())
    reference = OPTIMIZERS["torch's"](plain)
    for number in range(2):
        backward(model, rank, number)
        optimizer.step()
        optimizer.zero_grad()
        sum(plain(batch(r, number)).square().mean() / world_size for r in range(world_size)).backward()
        reference.step()
        reference.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.detach()), q.detach())


@multirank(2)
def test_what_ranks_may_do_alike(rank: int, world_size: int) -> None:
    """Nothing here is a divergence: no step at all, several optimizers, a scaler that skips, edits, another state."""
    plain = three_layers()
    model = shard_layers(plain)
    for number in range(2):
        backward(model, rank, number)
    model.zero_grad()
    first = sw.fully_shard_optimizer(torch.optim.SGD(model[0].parameters(), lr=1e-2))
    second = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(4):
        loss = model(batch(rank, number)).square().mean()
        if number == 1 and rank == 1:  # the scaler hears of it on every rank
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(first)
        if number % 2:
            scaler.step(second)
        scaler.update()
        model.zero_grad()
    if rank == 0:  # as torch gives an optimizer a state, say to save it
        for p in model[2].parameters():
            p.grad = torch.zeros_like(p)
        for group in second.param_groups:
            group["lr"] = 0.0
        second.step()
        for group in second.param_groups:
            group["lr"] = 1e-2
        model.zero_grad()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    backward(model, rank, 5)
    other = copy.deepcopy(model)
    backward(other, rank, 6)
    model.load_state_dict(other.state_dict())
    backward(model, rank, 7)


# -- on an accelerator -----------------------------------------------------------------------------------------------


@contextmanager
def accelerator(**options: Any) -> Iterator[Any]:
    """A model that takes the CPU for an accelerator, where no record is exchanged before a collective."""
    with stand_in_device():
        model = shard_layers(three_layers(), **options)
        for module in (model, model[0], model[2]):
            unit = getattr(module, UNIT)
            for comm in (*unit.ranks.every, unit.comm):
                comm._gloo = comm.exchanges = False
        yield model


@multirank(2, 3)
@pytest.mark.parametrize(
    "strategy", ["ddp", "zero3"]
)  # of the others a rank that has not stepped gathers nothing
def test_on_an_accelerator_the_flag_is_read_before_the_next_step(
    rank: int, world_size: int, strategy: str
) -> None:
    with accelerator(strategy=strategy) as model:
        optimizer = OPTIMIZERS["wrapped"](model)
        for number in range(3):
            backward(model, rank, number)
            if number != 2 or rank:
                optimizer.step()
            optimizer.zero_grad()
        before = [p.to_local().clone() for p in model.parameters()]
        backward(model, rank, 3)
        others = "rank 1" if world_size == 2 else "ranks 1, 2"
        with ages(2, 3, "rank 0", others):
            optimizer.step()
        assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before, strict=True))


@multirank(2)
def test_on_an_accelerator_kept_weights_are_no_divergence(rank: int, world_size: int) -> None:
    """Their numbers are of the gather that filled them, whatever has been stepped since."""
    for options in ({"strategy": "zero1"}, {"reshard_after_forward": False}, {}):
        with accelerator(**options) as model:
            optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (model[0], model)]
            for number in range(6):
                if number == 3:
                    with torch.no_grad():
                        model(batch(rank, number))
                backward(model, rank, number)
                optimizers[number % 2].step()
                model.zero_grad()


@multirank(4)
def test_on_an_accelerator_gathers_among_neighbours(rank: int, world_size: int) -> None:
    """A step of other units between forward and backward does not make what was kept after forward too old."""
    with accelerator(reshard_after_forward=2) as model:
        for module in (model[0], model[2], model):
            comm = getattr(module, UNIT).site.neighbours
            comm._gloo = comm.exchanges = False
        optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
        for number in range(3):
            y = model[2](model[1](model[0](batch(rank, number))))
            model(batch(rank, number)).square().mean().backward()
            optimizer.step()
            y.square().mean().backward()
            model.zero_grad()
