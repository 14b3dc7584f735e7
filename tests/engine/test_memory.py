"""Planned memory: the same bits on every allocator, no lease outside the plan in planned order, and exact beyond it."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.engine.memory import Dynamic, Item, Plan, Planned, Slab
from tests.engine.kit.models import build, loss_of, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.engine.kit.training import units_of
from tests.support import multirank
from tests.support.matrix import select, together


class Bump:
    """An allocator of a user's: one tensor per slab, for ever."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self.leased: set[int] = set()

    def lease(self, slab: Slab) -> torch.Tensor | None:
        assert id(slab) not in self.leased
        self.leased.add(id(slab))
        if id(slab) not in self.made:
            self.made[id(slab)] = torch.empty(slab.nbytes, dtype=torch.uint8, device=slab.device)
        return self.made[id(slab)] if slab.nbytes else None

    def release(self, slab: Slab, memory: torch.Tensor | None) -> None:
        self.leased.remove(id(slab))


def model_of(memory: Any, *, layers: int = 4, equal: bool = False, **options: Any) -> nn.Module:
    """A chain of blocks, of two widths unless ``equal``; the embedding and the head are the root's."""
    torch.manual_seed(0)
    rows = [
        nn.Sequential(nn.Linear(8, w), nn.Tanh(), nn.Linear(w, 8))
        for w in (6, 6 if equal else 17) * (layers // 2)
    ]
    model = nn.Sequential(nn.Linear(8, 8), *rows, nn.Linear(8, 8))
    root = {"memory": memory, "prefetch": options.pop("prefetch", 1), "strict": options.pop("strict", False)}
    for row in rows:
        sw.fully_shard(row, **options)
    return sw.fully_shard(model, **options, **root)


def pools(model: nn.Module) -> Any:
    return units_of(model)[0].root.pools


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int, micros: int = 1
) -> list[float]:
    losses = []
    for micro in range(micros):
        torch.manual_seed(100 * number + 10 * micro + rank)
        loss = model(torch.randn(3, 8)).float().square().sum()
        loss.backward()
        losses.append(loss.item())
    sw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def train(model: nn.Module, rank: int, steps: int = 4, micros: int = 1) -> list[float]:
    optimizer = adamw(model)
    return [loss for number in range(steps) for loss in step(model, optimizer, rank, number, micros)]


@contextmanager
def quiet() -> Iterator[list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        told: list[str] = []
        yield told
    told += [str(w.message) for w in seen if "outside the plan" in str(w.message)]


MEMORIES = ["double_buffer", "max_pool", "arena", "own"]
POLICIES = {
    "fp32": sw.MixedPrecisionPolicy(),
    "bf16": sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
WHERE = [
    *on("zero3", (2,), (3,)),
    *on("zero1", (2,)),
    *on("zero2", (2,)),
    *on("hsdp", (2, 2)),
    *on("hfsdp", (2, 2)),
]
LAYOUTS = {"per_parameter": "per_parameter", "row": "ragged"}
ROWS = select(
    (
        (at, memory, *rest)
        for at, memory, *rest in itertools.product(
            WHERE, MEMORIES, LAYOUTS, [("fp32", 1), ("bf16", 2), ("bf16", 0), ("fp32", "1 KiB"), ("fp32", 3)]
        )
        if max(at.stages) == 3 or memory in ("arena", "own")  # pools are refused where parameters stay
    ),
    lambda row, strength: together(strength, *row),
)
CASES = [(*row, *settings) for *row, settings in ROWS]


@functools.cache
def losses_without_a_plan(rank: int, at: On, layout: str, precision: str, equal: bool) -> list[float]:
    return train(planned_for(at, "dynamic", layout, precision, equal), rank, steps=3, micros=2)


def planned_for(at: On, memory: Any, layout: str, precision: str, equal: bool, **options: Any) -> nn.Module:
    where = {"mesh": at.mesh, "strategy": at.strategy, "layout": LAYOUTS[layout]}
    return model_of(memory, mp_policy=POLICIES[precision], equal=equal, **where, **options)


@on_meshes(CASES)
def test_the_same_bits_and_no_lease_outside_the_plan(
    rank: int, world_size: int, at: On, memory: str, layout: str, precision: str, prefetch: int | str
) -> None:
    os.environ["SHARDWRIGHT_POISON"] = "1"
    settings = (layout, precision, memory == "double_buffer")
    expected = losses_without_a_plan(rank, at, *settings)
    model = planned_for(at, Bump() if memory == "own" else memory, *settings, prefetch=prefetch)
    with quiet() as told:
        assert train(model, rank, steps=3, micros=2) == expected
    assert told == []
    planned = pools(model).allocator
    if memory == "own":
        assert planned.made
    else:
        assert isinstance(planned, Planned) and planned.dynamic == 0
        assert planned.planned > 0
    if memory == "arena":
        assert pools(model).plan.nbytes <= 1.02 * pools(model).plan.lower_bound


def reversed_order(model: nn.Module) -> Callable[[], None]:
    one, two = model[1], model[4]
    model[1], model[4] = two, one

    def back() -> None:
        model[1], model[4] = one, two

    return back


def twice(model: nn.Module) -> Callable[[], None]:
    handle = model[2].register_forward_hook(lambda m, args, output: output + model[3](args[0]))
    return handle.remove


def skipped(model: nn.Module) -> Callable[[], None]:
    one = model[2]
    model[2] = nn.Identity()
    return lambda: model.__setitem__(2, one)


def failing(model: nn.Module) -> Callable[[], None]:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model[3].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(3, 8))
    handle.remove()
    loss = model(torch.randn(3, 8)).sum()
    handle = model[3].register_full_backward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(3, 8)).sum().backward()
    handle.remove()
    del loss
    model.zero_grad()
    return lambda: None


def evaluating(model: nn.Module) -> Callable[[], None]:
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(3, 8))
    return lambda: None


def recomputing(model: nn.Module) -> Callable[[], None]:
    row = model[2]
    forward = row.forward
    row.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    return lambda: setattr(row, "forward", forward)


CHANGES = [reversed_order, twice, skipped, failing, evaluating, recomputing]


def changed_for_two_steps(
    memory: str, change: Callable[[nn.Module], Callable[[], None]], rank: int
) -> tuple[Any, list[float], list[torch.Tensor]]:
    """A model after eight steps, the fourth and the fifth of which are changed; its losses and full parameters."""
    model = model_of(memory)
    optimizer = adamw(model)
    losses = []
    with quiet():
        for number in range(8):
            back = change(model) if number in (3, 4) else None
            losses += step(model, optimizer, rank, number)
            if back is not None:
                back()
    return model, losses, [p.full_tensor() for p in model.parameters()]


@functools.cache
def changed_without_a_plan(
    change: Callable[[nn.Module], Callable[[], None]], rank: int
) -> tuple[list[float], list[torch.Tensor]]:
    return changed_for_two_steps("dynamic", change, rank)[1:]


@pytest.mark.extensive(
    "each kind of memory", but=("reversed_order-max_pool-*", "failing-max_pool-*", "skipped-max_pool-*")
)
@multirank(2)
@pytest.mark.parametrize("memory", ["max_pool", "arena"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_beyond_the_plan_results_are_the_same(
    rank: int, world_size: int, memory: str, change: Callable[[nn.Module], Callable[[], None]]
) -> None:
    os.environ["SHARDWRIGHT_POISON"] = "1"
    expected_losses, expected = changed_without_a_plan(change, rank)
    model, losses, found = changed_for_two_steps(memory, change, rank)
    assert losses == expected_losses
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    assert pools(model).allocator.dynamic == 0  # in planned order again, after it was planned anew


@multirank(2)
@pytest.mark.parametrize("memory", ["max_pool", "arena"])
def test_strict_raises_and_training_goes_on(rank: int, world_size: int, memory: str) -> None:
    model = model_of(memory, strict=True)
    optimizer = adamw(model)
    for number in range(3):
        step(model, optimizer, rank, number)
    handle = model[1].register_forward_hook(lambda m, args, output: output + model[3](args[0]))
    with pytest.raises(
        RuntimeError, match=r"Unit '\d' leases memory for its \w+ outside the plan.*strict=False"
    ):
        for number in range(3, 5):
            step(model, optimizer, rank, number)
    handle.remove()
    model.zero_grad()
    for number in range(5, 7):
        step(model, optimizer, rank, number)


@multirank(2)
def test_a_planned_model_inside_a_planned_model(rank: int, world_size: int) -> None:
    os.environ["SHARDWRIGHT_POISON"] = "1"

    found = []
    for memory in ("dynamic", "arena"):
        outer = model_of(memory)
        inner = model_of(memory)
        hook = outer[2].register_forward_hook(lambda m, a, o, inner=inner: o + inner(a[0]))
        optimizers = [adamw(outer), adamw(inner)]
        losses = []
        for number in range(5):
            torch.manual_seed(number + 10 * rank)
            loss = outer(torch.randn(3, 8)).square().sum()
            loss.backward()
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        hook.remove()
        found.append(losses)
    assert found[0] == found[1]
    assert pools(outer).allocator is not pools(inner).allocator
    assert pools(outer).allocator.dynamic == pools(inner).allocator.dynamic == 0


def wrong_order(plan: Plan) -> Plan:
    return Plan(plan.items, tuple(reversed(plan.offsets)), plan.nbytes, plan.lower_bound)


def all_at_one_place(plan: Plan) -> Plan:
    return Plan(plan.items, (0,) * len(plan.items), plan.nbytes, plan.lower_bound)


def too_small(plan: Plan) -> Plan:
    items = tuple(Item(i.unit, i.kind, i.nbytes // 2, i.spans) for i in plan.items)
    return Plan(items, plan.offsets, plan.nbytes, plan.lower_bound)


@multirank(2)
@pytest.mark.parametrize("wrong", [wrong_order, all_at_one_place, too_small], ids=lambda w: w.__name__)
def test_wrong_plans_change_no_bit_and_are_named(
    rank: int, world_size: int, wrong: Callable[[Plan], Plan]
) -> None:
    os.environ["SHARDWRIGHT_POISON"] = "1"
    expected = train(model_of("dynamic"), rank)
    model = model_of("arena")
    optimizer = adamw(model)
    losses = step(model, optimizer, rank, 0)
    of_model = pools(model)
    make = of_model._use

    def use(allocator: Any) -> None:
        if isinstance(allocator, Planned):
            plan = wrong(allocator.plan)
            slabs = sorted(allocator._places, key=allocator._places.__getitem__)
            allocator = Planned(plan, slabs, torch.empty(plan.nbytes, dtype=torch.uint8), of_model)
        make(allocator)

    of_model._use = use
    of_model._left = 0
    with quiet() as told:
        for number in range(1, 4):
            losses += step(model, optimizer, rank, number)
    assert losses == expected
    assert of_model.allocator.dynamic > 0
    assert told and all("Unit '" in message and "memory='arena'" in message for message in told)


@multirank(2)
def test_gradients_that_are_kept_stay_right(rank: int, world_size: int) -> None:
    """A gradient that the user keeps has its memory for itself, in an arena too, whatever becomes of the model."""
    model = model_of("arena")
    optimizer = adamw(model)
    for number in range(3):
        step(model, optimizer, rank, number)
    model(torch.ones(3, 8)).sum().backward()
    kept = [p.grad for p in model.parameters()]
    values = [g.to_local().clone() for g in kept]
    optimizer.zero_grad()
    with quiet():
        for number in range(3):
            step(model, optimizer, rank, number)
    del model, optimizer
    assert all(torch.equal(g.to_local(), v) for g, v in zip(kept, values, strict=True))


@multirank(2)
def test_options_are_the_roots(rank: int, world_size: int) -> None:
    rows = [nn.Linear(4, 4), nn.Linear(4, 4)]
    sw.fully_shard(rows[0], memory="arena")
    model = sw.fully_shard(nn.Sequential(*rows))
    with pytest.raises(ValueError, match=r"fully_shard of '0' got memory, prefetch or strict.*Sequential"):
        model(torch.ones(1, 4))
    for options, match in (
        (
            {"memory": "pool"},
            r"memory: expected one of dynamic, double_buffer, max_pool, arena, or an import path .*, found 'pool'",
        ),
        ({"memory": 3}, r"memory: expected an object with the methods of sw.Allocator or one of .*, found 3"),
        (
            {"prefetch": -1},
            'prefetch must be a number of units, 0 or more, or bytes such as "512 MiB", got -1',
        ),
        ({"prefetch": "3 apples"}, "prefetch must be a number of units"),
        ({"strict": 1}, "strict must be True or False, got 1"),
    ):
        with pytest.raises(ValueError, match=match):
            sw.fully_shard(nn.Linear(4, 4), **options)
    unequal = model_of("double_buffer")
    with pytest.raises(
        ValueError, match=r"units of one size; found .* bytes: 2, 4; .* bytes: 1, 3. Use memory="
    ):
        unequal(torch.ones(1, 8))


@multirank(2)
def test_an_allocator_that_gives_too_little_is_named(rank: int, world_size: int) -> None:
    class Small(Bump):
        def lease(self, slab: Slab) -> torch.Tensor | None:
            return torch.empty(slab.nbytes - 1, dtype=torch.uint8) if slab.nbytes else None

    with pytest.raises(ValueError, match=r"Small.lease returned \d+ bytes .* for \d+ bytes of unit"):
        model_of(Small())(torch.ones(1, 8))


@multirank(2)
def test_the_language_model_on_every_allocator(rank: int, world_size: int) -> None:
    found = []
    for memory in ("dynamic", "max_pool", "arena"):
        model = build()
        for block in model.blocks:
            sw.fully_shard(block)
        sw.fully_shard([model.norm, model.head])
        sw.fully_shard(model, memory=memory)
        optimizer = adamw(model)
        losses = []
        for number in range(4):
            batch = tokens(number, 0, rank)
            loss = loss_of(model(batch), batch)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    assert found[0] == found[1] == found[2]


@multirank(2)
def test_the_documented_allocator(rank: int, world_size: int) -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    code = next(block for block in page.split("```python\n") if "class Freelist" in block).split("```")[0]
    names: dict[str, Any] = {"sw": sw, "model": nn.Linear(2, 2)}
    exec(code, names)
    freelist = names["Freelist"]()
    expected = train(model_of("dynamic"), rank)
    model = model_of(freelist)
    optimizer = adamw(model)
    losses, sizes = [], []
    for number in range(4):
        losses += step(model, optimizer, rank, number)
        sizes.append(freelist.nbytes)
    assert losses == expected and sizes[1:] == [sizes[1]] * 3


@multirank(2)
def test_report(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="needs a sharded model, got a plain Linear"):
        sw.memory_report(nn.Linear(2, 2))
    for memory in ("dynamic", "max_pool", "arena"):
        model = model_of(memory, layers=6)
        assert "No backward has ended yet" in str(sw.memory_report(model))
        optimizer = adamw(model)
        for number in range(3):
            step(model, optimizer, rank, number)
        report = sw.memory_report(model, optimizer)
        local = sum(p.to_local().nbytes for p in model.parameters())
        assert local <= report.shards <= local + 64 * len(list(model.parameters()))
        assert report.gradients == 0 and report.rest == 0 and report.leased == {}
        assert report.rank == rank and report.buffers == sum(b.nbytes for b in model.buffers())
        assert 2 * local <= report.optimizer <= 2 * local + 64 * len(list(model.parameters()))
        slabs = sorted((u.weights.copy.slab.nbytes for u in units_of(model) if u.number), reverse=True)
        # Two units and the root's, one reduction, and gradients of what is through.
        assert report.at_peak["parameters"] <= sum(slabs[:2]) + units_of(model)[0].weights.copy.slab.nbytes
        assert report.peak is not None and report.peak >= sum(report.at_peak.values())
        assert report.peak_at is not None and report.peak_at[1] in report.at_peak
        text = str(report)
        assert "peak of leases in a step" in text and f"Memory of rank {rank} alone" in text
        if memory != "dynamic":
            assert report.plan is pools(model).plan and report.leases[1] == 0
            assert "leases inside the plan, 0 outside" in text
        loss = model(torch.ones(1, 8)).sum()
        assert (
            sw.memory_report(model).leased.get("parameters", 0) == units_of(model)[0].weights.copy.slab.nbytes
        )
        loss.backward()
        assert sw.memory_report(model).gradients >= local


class ByHand:
    """An update without an optimizer of torch."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter.sub_(0.01 * parameter.grad)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


STEPPERS: dict[str, Callable[[list[Any]], Any]] = {
    "torch": torch.optim.AdamW,
    "wrapped": lambda parameters: sw.fully_shard_optimizer(torch.optim.AdamW(parameters)),
    "rate of 0": lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    "in backward": lambda parameters: sw.optim.in_backward(torch.optim.AdamW(parameters)),
    "by hand": ByHand,
}


@pytest.mark.extensive(
    "each stepper of each strategy", but=("zero3-*-2ranks", "ddp-torch-2ranks", "zero1-in backward-2ranks")
)
@multirank(1, 2)
@pytest.mark.parametrize("stepper", STEPPERS)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_the_report_has_the_peak_after_each_step(
    rank: int, world_size: int, strategy: str, stepper: str
) -> None:
    """Whatever makes the step, and with each kind of memory."""
    for memory in ("dynamic", "arena", *(("max_pool",) if strategy == "zero3" else ())):
        model = model_of(memory, strategy=strategy)
        optimizer = STEPPERS[stepper](list(model.parameters()))
        peaks: list[int] = []
        for number in range(4):
            torch.manual_seed(10 * number + rank)
            loss = model(torch.randn(3, 8)).square().sum()
            words = "peak of leases in a step" if number else "No backward has ended yet"
            assert words in str(sw.memory_report(model))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = sw.memory_report(model)
            assert report.peak_at is not None and "No backward" not in str(report)
            peaks.append(report.peak or 0)
        assert 0 < peaks[0] <= peaks[1] and peaks[1:] == [peaks[1]] * 3, (memory, peaks)


@multirank(2)
@pytest.mark.parametrize("memory", ["dynamic", "max_pool", "arena", "own"])
def test_deleting_the_model_frees_its_memory_without_the_collector(
    rank: int, world_size: int, memory: str
) -> None:
    gc.collect()
    gc.disable()
    try:
        model = model_of(Bump() if memory == "own" else memory)
        optimizer = adamw(model)
        for number in range(4):
            step(model, optimizer, rank, number)
        unit = units_of(model)[1]
        watched = [
            weakref.ref(x)
            for x in (model, unit, unit.root, unit.weights.copy.slab, pools(model), pools(model).allocator)
        ]
        if isinstance(pools(model).allocator, Planned):
            watched.append(weakref.ref(pools(model).allocator.block))
        del model, optimizer, unit
        alive = [type(w()).__name__ for w in watched if w() is not None and not isinstance(w(), Dynamic)]
        assert alive == []
    finally:
        gc.enable()
