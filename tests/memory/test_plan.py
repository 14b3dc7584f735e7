"""Properties of memory plans, over random traces."""

from __future__ import annotations

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.memory import Item, Plan, pack, peak, slots
from shardwright.memory.plan import ALIGN, aligned, most_at_once, overlap


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


@given(traces())
@settings(deadline=None)
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


def test_a_thousand_items_take_less_than_two_seconds() -> None:
    items = chain([2**20 * (1 + i % 7) for i in range(1000)], 2)
    start = time.process_time()
    pack(items)
    assert (
        time.process_time() - start < 10
    )  # 0.6 s on one core of a desktop; a bound against quadratic mistakes
