"""Optimizers and clipping over shards: the numbers of the plain model, DTensors outside, plain tensors inside."""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import shardwright as sw
from tests.engine.kit.models import Reference, build, full, loss_of, shard, tokens
from tests.support import multirank

OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "AdamW-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "AdamW-fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "Adam-amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
}


def gradients(model: nn.Module, rank: int, step: int) -> None:
    batch = tokens(step, 0, rank)
    loss_of(model(batch), batch).backward()


@multirank(1, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_the_plain_optimizers(rank: int, world_size: int, name: str) -> None:
    plain = build()
    reference = Reference(plain, torch.float32, torch.float32)
    model = shard(plain)
    optimizer = sw.fully_shard_optimizer(OPTIMIZERS[name](model.parameters()))
    expected = OPTIMIZERS[name](reference.model.parameters())
    for step in range(3):
        gradients(model, rank, step)
        reference.backward(world_size, [[tokens(step, 0, r) for r in range(world_size)]])
        ours = sw.clip_grad_norm_(model.parameters(), 0.3)
        theirs = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.3)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        # The very same gradients on both sides: Adam turns a rounding difference of a tiny gradient into a whole step.
        for p, q in zip(model.parameters(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-6)
            q.grad.copy_(full(p.grad))
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        for p, q in zip(model.parameters(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(full(p), q, rtol=1e-6, atol=1e-7)
            q.data.copy_(full(p))


@multirank(2)
def test_groups_and_state_hold_dtensors_between_steps(rank: int, world_size: int) -> None:
    model = shard(build())
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    assert isinstance(optimizer, torch.optim.AdamW) and sw.fully_shard_optimizer(optimizer) is optimizer
    inside = []
    optimizer.register_step_pre_hook(
        lambda o, a, k: inside.extend(type(p) for g in o.param_groups for p in g["params"])
    )
    gradients(model, rank, 0)
    optimizer.step()
    assert set(inside) == {torch.Tensor}
    parameters = list(model.parameters())
    assert optimizer.param_groups[0]["params"] == parameters
    assert set(optimizer.state) == set(parameters)
    for p in parameters:
        for key in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[p][key]
            assert isinstance(value, DTensor) and value.shape == p.shape and value.placements == p.placements
    assert optimizer.state_dict()["state"][0]["exp_avg"] is optimizer.state[parameters[0]]["exp_avg"]


@multirank(2)
def test_state_loaded_or_edited_between_steps_is_used(rank: int, world_size: int) -> None:
    def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
        for step in steps:
            gradients(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()

    first = shard(build())
    one = sw.fully_shard_optimizer(torch.optim.AdamW(first.parameters(), lr=0.01))
    train(one, first, range(2))
    second = shard(build(seed=5))
    two = sw.fully_shard_optimizer(torch.optim.AdamW(second.parameters(), lr=0.01))
    train(two, second, range(7, 8))
    second.load_state_dict(first.state_dict())
    saved = copy.deepcopy(get_optimizer_state_dict(first, one))
    set_optimizer_state_dict(second, two, saved)
    for _, value in two.state.items():
        value["exp_avg"] = value["exp_avg"].clone()
    train(one, first, range(2, 4))
    train(two, second, range(2, 4))
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p.to_local(), q.to_local(), rtol=0, atol=0)


@multirank(2)
def test_an_exception_in_step_restores_the_groups(rank: int, world_size: int) -> None:
    model = shard(build())
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def fail(*_: object) -> None:
        raise KeyError

    handle = optimizer.register_step_pre_hook(fail)
    gradients(model, rank, 0)
    with pytest.raises(KeyError):
        optimizer.step()
    handle.remove()
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    optimizer.step()


@multirank(2)
def test_a_gradient_that_does_not_fit_changes_nothing(rank: int, world_size: int) -> None:
    model = shard(build())
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    gradients(model, rank, 0)
    *_, last = model.parameters()
    right, broken = last.grad, last.grad.clone()
    broken._local_tensor = torch.ones(3, 3)
    last.grad = broken
    with pytest.raises(RuntimeError, match=r"grad"):
        optimizer.step()
    assert all(
        isinstance(p, DTensor) and p.to_local().grad is None for p in optimizer.param_groups[0]["params"]
    )
    last.grad = right
    optimizer.step()


@multirank(2)
def test_schedulers_and_closures_work(rank: int, world_size: int) -> None:
    model = shard(build())
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5**s)
    before = [full(p).clone() for p in model.parameters()]
    loss = optimizer.step(lambda: (lambda b: loss_of(model(b), b))(tokens(0, 0, rank)).backward() or 3.0)
    scheduler.step()
    assert loss == 3.0 and optimizer.param_groups[0]["lr"] == 0.05
    assert any(not torch.equal(full(p), b) for p, b in zip(model.parameters(), before, strict=True))


def sequence(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    schedulers = torch.optim.lr_scheduler
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.ExponentialLR(optimizer, 0.5)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6),
    "sequence": sequence,
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


@multirank(2)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_that_were_built_first(rank: int, world_size: int, name: str) -> None:
    """Before the optimizer is one for shards, or even before the model is sharded; another one afterwards."""

    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.1)

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def linear() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(5, 3)

    for kind, first in ((sgd, "model"), (adam, "scheduler")):
        plain, model = linear(), linear()
        expected = kind(plain.parameters())
        if first == "model":
            sw.fully_shard(model)
        optimizer = kind(model.parameters())
        theirs, ours = SCHEDULERS[name](expected), SCHEDULERS[name](optimizer)
        if first != "model":
            sw.fully_shard(model)
        sw.fully_shard_optimizer(optimizer)
        later = [torch.optim.lr_scheduler.ConstantLR(o, factor=1.0) for o in (expected, optimizer)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                for each, its in ((plain, expected), (model, optimizer)):
                    each(torch.full((2, 5), step + 1.0)).pow(2).mean().backward()
                    its.step()
                    its.zero_grad()
                for scheduler in (theirs, ours):
                    scheduler.step(*([1.0] if name == "plateau" else []))
                for scheduler in later:
                    scheduler.step()
                options = [
                    {k: v for k, v in o.param_groups[0].items() if k != "params"}
                    for o in (expected, optimizer)
                ]
                assert options[0] == options[1], step
        assert optimizer.param_groups[0]["lr"] != 0.1
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p), q, rtol=1e-5, atol=1e-6)  # the mean over ranks rounds


@multirank(1)
@pytest.mark.parametrize("stepped", ["never", "before", "after"])
def test_schedulers_know_whether_the_optimizer_was_stepped(rank: int, world_size: int, stepped: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if stepped == "before":
        optimizer.step()
    sw.fully_shard(model)
    sw.fully_shard_optimizer(optimizer)
    if stepped == "after":
        optimizer.step()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        scheduler.step()
    assert ["before `optimizer.step()`" in str(each.message) for each in told] == [True] * (
        stepped == "never"
    )


@multirank(1)
def test_other_replacements_of_the_step_are_refused(rank: int, world_size: int) -> None:
    """They would go past the step for shards, as would one that a scheduler has wrapped again."""
    for scheduled in (False, True):
        optimizer: Any = torch.optim.SGD(sw.fully_shard(nn.Linear(2, 2)).parameters(), lr=0.1)
        inner = optimizer.step

        def counted(*args: Any, inner: Any = inner) -> Any:
            return inner(*args)

        optimizer.step = types.MethodType(counted, optimizer) if scheduled else counted
        if scheduled:
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with pytest.raises(ValueError, match=r"counted.* has already replaced the step of this SGD"):
            sw.fully_shard_optimizer(optimizer)
        assert type(optimizer) is torch.optim.SGD and "step" in vars(optimizer)


@multirank(2)
def test_optimizers_that_cannot_step_on_shards(rank: int, world_size: int) -> None:
    with pytest.raises(TypeError, match=r"expects a torch.optim.Optimizer, got str"):
        sw.fully_shard_optimizer("adamw")


@multirank(1, 2, 3)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_clipping_equals_the_plain_models(
    rank: int, world_size: int, norm_type: float, max_norm: float
) -> None:
    plain = build()
    ignored = plain.head.bias
    reference = Reference(plain, torch.float32, torch.float32)
    reference.backward(world_size, [[tokens(0, 0, r) for r in range(world_size)]])
    model = shard(plain, ignored_params={ignored})
    gradients(model, rank, 0)
    ignored.grad = dict(reference.model.named_parameters())["head.bias"].grad.clone()
    norm = sw.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(reference.model.parameters(), max_norm, norm_type)
    assert type(norm) is torch.Tensor and norm.ndim == 0
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for p, q in zip(model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-8)


@multirank(2)
def test_clipping_without_gradients_and_with_infinite_ones(rank: int, world_size: int) -> None:
    model = shard(build())
    assert sw.clip_grad_norm_(model.parameters(), 1.0).item() == 0.0
    gradients(model, rank, 0)
    if rank == 1:
        model.head.weight.grad.to_local().fill_(math.inf)
    with pytest.raises(RuntimeError, match=r"norm of order 2.0 is (inf|nan)"):
        sw.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_norms_of_no_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"norm_type must be positive, got 0.0"):
        sw.clip_grad_norm_([], 1.0, 0)


@multirank(2)
def test_torchs_own_clipping_works_too(rank: int, world_size: int) -> None:
    model = shard(build())
    gradients(model, rank, 0)
    theirs = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
    torch.testing.assert_close(sw.clip_grad_norm_(model.parameters(), 1e9), theirs, rtol=1e-5, atol=0)
