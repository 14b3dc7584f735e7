"""An exception, as of a signal's handler, at any line of an optimizer's step: the next forward is right, or every rank
raises an error that says that weights must be loaded again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from tests.engine.kit.interrupts import Interrupt, interrupted_at
from tests.engine.kit.models import full, shard_layers, three_layers
from tests.support import multirank
from tests.support.matrix import everything

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-2),
    "one by one": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-2, foreach=False),
}


def backward(model: Any, rank: int, number: int) -> None:
    model.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank))
    model(x).square().mean().backward()


def weights(model: Any) -> list[torch.Tensor]:
    return [full(p.detach()).clone() for p in model.parameters()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, two, strict=True))


@multirank(2, timeout=120.0)
@pytest.mark.extensive("each optimizer and way", but=("sgd-plain-all-zero3-*",))
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize("way", ["plain", "wrapped"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_interrupt_at_any_line_of_an_optimizers_step(
    rank: int, world_size: int, kind: str, way: str, who: str, strategy: str
) -> None:
    plain = three_layers()
    model = shard_layers(plain, strategy=strategy)
    state = copy.deepcopy(plain.state_dict())

    def make() -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[kind](model)
        return sw.fully_shard_optimizer(optimizer) if way == "wrapped" else optimizer

    def begin() -> torch.optim.Optimizer:
        model.load_state_dict(state)
        optimizer = make()
        backward(model, rank, 0)
        optimizer.step()
        backward(model, rank, 1)
        return optimizer

    optimizer, before = begin(), weights(model)
    with interrupted_at(0, "/optim/") as lines:
        optimizer.step()
    after = weights(model)
    optimizer.step()
    twice = weights(model)
    places = [lines]
    dist.broadcast_object_list(places, 1)
    total, *firsts = places[0]
    refused = 0
    for n in range(1, total + 1) if everything() else firsts[::4]:
        for retried in (False, True):
            optimizer, error = begin(), None
            try:
                with interrupted_at(n if rank == 1 or who == "all" else 0, "/optim/"):
                    optimizer.step()
            except Interrupt as place:
                where = str(place)
                torch.set_grad_enabled(True)  # an interrupt in torch's own `finally` leaves it off
                if retried:
                    try:
                        optimizer.step()
                    except RuntimeError as raised:
                        error = raised
                    assert error is None or "Load a checkpoint" in str(error)
            try:
                backward(model, rank, 2)
            except RuntimeError as raised:
                error = raised
                assert "interrupted" in str(error) or "Load a state dict" in str(error), (n, error)
            outcome = torch.tensor(float(error is not None))
            dist.all_reduce(outcome)
            assert outcome in (0, world_size), (n, "some ranks have raised", error)
            refused += error is not None
            # A step that ended before the interrupt and is called again is a second step, as in plain torch.
            right = (before, after, twice) if retried else (before, after)
            assert error is not None or any(same(weights(model), each) for each in right), (n, retried, where)
    assert refused


@multirank(2)
def test_a_closure_calls_the_model_within_a_step(rank: int, world_size: int) -> None:
    """That step has begun and runs: it is no interrupted one. One that fails in its closure has changed nothing."""
    model = shard_layers(three_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fails = [False, False, True, False]

    def closure() -> None:
        backward(model, rank, 0)
        if fails.pop(0):
            raise ValueError("bad batch")

    for number in range(4):
        before = weights(model)
        if number == 2:
            with pytest.raises(ValueError, match="bad batch"):
                optimizer.step(closure)
        else:
            optimizer.step(closure)
        assert same(weights(model), before) == (number == 2)
    newton = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def loss() -> torch.Tensor:
        backward(model, rank, 0)
        return torch.ones(())

    newton.step(loss)
    backward(model, rank, 1)


@multirank(2)
def test_a_second_backward_over_weights_that_in_backward_has_stepped_names_them(
    rank: int, world_size: int
) -> None:
    model = shard_layers(three_layers(), strategy="zero2")
    sw.optim.in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"steps in backward, and has stepped units .*set_is_last_backward"
    ):
        loss.backward()


@multirank(2, timeout=120.0)
def test_a_backward_that_one_rank_leaves_between_steps_of_units_is_refused(
    rank: int, world_size: int
) -> None:
    """Then one rank has stepped more units than the other."""
    plain = three_layers()
    model = shard_layers(plain)
    sw.optim.in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model, rank, 0)
    with interrupted_at(0, "/optim/") as lines:
        backward(model, rank, 1)
    places = [lines]
    dist.broadcast_object_list(places, 1)
    refused = 0
    for n in places[0][1::6]:
        model.load_state_dict(plain.state_dict())
        backward(model, rank, 0)
        try:
            with interrupted_at(n if rank == 1 else 0, "/optim/"):
                backward(model, rank, 1)
        except Interrupt:
            pass
        except RuntimeError as error:
            assert "diverged" in str(error), error
        try:
            backward(model, rank, 2)
        except RuntimeError as error:
            assert "Load a " in str(error), (n, error)
            refused += 1
    assert refused
