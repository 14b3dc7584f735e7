"""Properties of memory plans, over random traces."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from shardwright.engine.memory import Item, Plan, pack, peak, slots
from shardwright.engine.memory.packing import EFFORT, ORDERS, _Search
from shardwright.engine.memory.plan import ALIGN, aligned, fitting, most_at_once, overlap
from shardwright.engine.memory.planned import _overlaps
from tests.engine.memory.real_steps import STEPS, Step, record
from tests.support.fake import fake_ranks


@st.composite
def traces(draw: st.DrawFn) -> list[Item]:
    items = []
    for i in range(draw(st.integers(0, 12))):
        ticks = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=6)))
        spans = tuple(zip(ticks[::2], ticks[1::2], strict=False))
        items.append(Item(f"u{i}", "parameters", draw(st.integers(1, 5000)), spans))
    return items


def check(plan: Plan, items: list[Item]) -> None:
    assert plan.items == tuple(items) and len(plan.offsets) == len(items)
    for offset, item in zip(plan.offsets, items, strict=True):
        assert offset % ALIGN == 0 and offset >= 0 and offset + item.nbytes <= plan.nbytes
    for (i, one), (j, two) in itertools.combinations(enumerate(items), 2):
        if overlap(one, two):
            a, b = plan.offsets[i], plan.offsets[j]
            assert a + one.size <= b or b + two.size <= a, (one, two)


@pytest.mark.extensive("a matrix of random leases")
@given(traces())
@settings(deadline=None, max_examples=50)
def test_what_is_leased_together_does_not_overlap(items: list[Item]) -> None:
    plan = pack(items)
    check(plan, items)
    assert plan.lower_bound == peak(items) <= plan.nbytes <= sum(item.size for item in items)


@given(traces())
@settings(deadline=None)
def test_peak_and_overlap_by_counting(items: list[Item]) -> None:
    live = [
        [item for item in items if any(start <= tick < stop for start, stop in item.spans)]
        for tick in range(41)
    ]
    assert peak(items) == max(sum(item.size for item in at) for at in live)
    assert most_at_once(items) == max(map(len, live))
    for one, two in itertools.combinations(items, 2):
        assert overlap(one, two) == any(one in at and two in at for at in live)


def chain(sizes: list[int], depth: int, kept: int = 0) -> list[Item]:
    """Units one after another in forward and in reverse in backward, each gathered ``depth`` ahead."""
    n = len(sizes)
    items = []
    for i, size in enumerate(sizes):
        forward = (max(0, i - depth), i + 1)
        j = n - 1 - i
        backward = (n + max(0, j - depth), n + j + 1)
        spans = ((forward[0], backward[1]),) if i >= n - kept else (forward, backward)
        items.append(Item(f"blocks.{i}", "parameters", size, spans))
    return items


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.integers(0, 4), st.integers(0, 2))
@settings(deadline=None)
def test_slots_hold_what_follows_one_another(sizes: list[int], depth: int, kept: int) -> None:
    items = chain(sizes, depth)
    plan = slots(items, depth + 1)
    check(plan, items)
    largest = sorted((aligned(size) for size in sizes), reverse=True)
    for k, (_, size, unit) in enumerate(sorted(plan.slots, key=lambda slot: -slot[1])):
        assert size <= largest[k]
        assert any(item.unit == unit and item.size == size for item in items)


@given(st.integers(1, 10**6), st.integers(1, 60), st.integers(0, 4))
@settings(deadline=None)
def test_equal_units_reach_the_lower_bound(size: int, units: int, depth: int) -> None:
    for kept in (0, 1):
        items = chain([size] * units, depth, kept)
        assert pack(items).nbytes == peak(items)


def test_llama_and_hybrid_shapes_are_within_2_percent() -> None:
    """Traces as a step makes them: parameters, their casts, reduction buffers and gradients."""
    for pattern in ([3, 1, 5], [1], [2, 7], [4, 1, 1, 9, 2]):
        for depth in (1, 2):
            sizes = [(2**20 + 77) * pattern[i % len(pattern)] for i in range(40)]
            items = chain(sizes, depth, kept=1)
            n = len(sizes)
            for i, size in enumerate(sizes):
                done = n + (n - 1 - i) + 1
                items.append(Item(f"blocks.{i}", "reduction", size, ((done, done + 1),)))
                items.append(Item(f"blocks.{i}", "gradients", size // 8, ((done, 2 * n + 2),)))
            plan = pack(items)
            check(plan, items)
            assert plan.nbytes <= 1.02 * plan.lower_bound, (pattern, depth, plan.nbytes / plan.lower_bound)


@pytest.mark.extensive(
    "plans of thousands of leases", but=("Llama 8B, zero3, bf16", "hybrid 9B, zero3, bf16, 2*")
)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_plans_of_real_steps_are_within_2_percent(step: Step) -> None:
    with fake_ranks(math.prod(step.ranks)):
        items = record(step)
    plan = pack(items)
    check(plan, items)
    assert plan.nbytes <= 1.02 * plan.lower_bound, plan.nbytes / plan.lower_bound


@pytest.mark.extensive("a search of seconds")
def test_plans_depend_on_the_leases_alone() -> None:
    """All ranks must compute one plan. This step needs a search with random numbers."""
    with fake_ranks(256):
        items = record(Step("T5 3B", bf16=True, prefetch=2))
    random.seed(1)
    search = _Search(items)
    search.run()
    random.seed(2)
    assert search.orders > 6 and pack(items).offsets == tuple(search.offsets())


def test_work_of_one_order_is_linear_in_the_units() -> None:
    """Units that are released after forward meet few others."""
    pairs = {}
    for n in (100, 400):
        items = chain([2**20 * (1 + i % 7) for i in range(n)], 2)
        pairs[n] = _Search(items).pairs
    assert pairs[400] / pairs[100] == pytest.approx(4, rel=0.1)


@pytest.mark.extensive("a search of seconds")
def test_the_search_ends() -> None:
    """Items of random sizes and times reach no bound."""
    random.seed(0)
    items = [
        Item(
            f"u{i}",
            "parameters",
            random.randrange(1, 10**6),
            tuple(zip(ticks[::2], ticks[1::2], strict=True)),
        )
        for i in range(80)
        for ticks in [sorted(random.sample(range(500), 4))]
    ]
    search = _Search(items)
    search.run()
    assert search.height > 1.02 * search.bound
    assert search.effort < 3 * EFFORT + 3 * search.pairs and search.orders < 3 * ORDERS + 2


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=12))
def test_overlapping_places_by_comparing_all(ranges: list[tuple[int, int]]) -> None:
    places = [(start, start + size) for start, size in ranges]
    expected = [
        sum(1 << j for j, (low, high) in enumerate(places) if start < high and low < stop)
        for start, stop in places
    ]
    assert _overlaps(places) == expected


@given(traces(), st.integers(1, 4))
@settings(deadline=None)
def test_items_that_share_a_slot_do_not_meet(items: list[Item], count: int) -> None:
    chosen = sorted(fitting(items, count), key=lambda i: items[i].spans[0])
    for slot in range(count):
        for i, j in itertools.combinations(chosen[slot::count], 2):
            assert not overlap(items[i], items[j])
    if all(not overlap(*pair) for pair in itertools.combinations(items, 2)):
        assert len(chosen) == len(items)
