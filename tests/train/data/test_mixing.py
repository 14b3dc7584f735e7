"""Sources in proportion, and every sample of a source once per epoch, also where samples are appended."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from shardwright.train.data.samples.mixing import SLOTS, Appended, GrowingOrder, Mixing, SampleOrder, slots_of

some_weights = st.lists(st.floats(0.2, 100), min_size=1, max_size=5)


def mixing_of(weights: list[float], seed: int = 0) -> Mixing:
    return Mixing(slots_of(weights, [1.0] * len(weights)), seed)


# ------------------------------------------------------------------------------
# Shares


@settings(max_examples=200, deadline=None)
@given(weights=some_weights)
def test_slots_are_within_one_of_the_exact_share(weights: list[float]) -> None:
    slots = slots_of(weights, [1.0] * len(weights))
    assert sum(slots) == SLOTS
    for weight, number in zip(weights, slots, strict=True):
        assert abs(number - SLOTS * weight / sum(weights)) < 1


def test_shares_are_of_tokens() -> None:
    # Samples of the second source are half full, so it needs twice as many of them.
    assert slots_of([1, 1], [512, 256]) == (1365, 2731)
    assert slots_of([1, 1, 2], [7, 7, 7]) == (1024, 1024, 2048)


@settings(max_examples=30, deadline=None)
@given(weights=some_weights, seed=st.integers(0, 2**64), cycle=st.integers(0, 10**9))
def test_every_cycle_has_exact_shares(weights: list[float], seed: int, cycle: int) -> None:
    mixing = mixing_of(weights, seed)
    counts = Counter(mixing[index][0] for index in range(cycle * SLOTS, (cycle + 1) * SLOTS))
    assert [counts[source] for source in range(len(weights))] == list(mixing.slots)


@settings(max_examples=30, deadline=None)
@given(weights=some_weights, seed=st.integers(0, 2**64), stop=st.integers(1, 3 * SLOTS))
def test_indices_of_a_source_count_up(weights: list[float], seed: int, stop: int) -> None:
    mixing = mixing_of(weights, seed)
    following = [0] * len(weights)
    for index in range(stop):
        source, number = mixing[index]
        assert number == following[source]
        following[source] += 1
    assert mixing.counts(stop) == tuple(following)


@settings(max_examples=50, deadline=None)
@given(
    weights=some_weights,
    seed=st.integers(0, 2**64),
    indices=st.lists(st.integers(0, 10**15), min_size=2, max_size=40),
)
def test_random_access_equals_iteration(weights: list[float], seed: int, indices: list[int]) -> None:
    mixing = mixing_of(weights, seed)
    for index in indices:
        source, number = mixing[index]
        before, after = mixing.counts(index), mixing.counts(index + 1)
        assert number == before[source]
        assert [b - a for a, b in zip(before, after, strict=True)] == [
            int(source == other) for other in range(len(weights))
        ]


def test_cycles_and_seeds_have_orders_of_their_own() -> None:
    def sources(seed: int, cycle: int) -> tuple[int, ...]:
        mixing = mixing_of([1, 1], seed)
        return tuple(mixing[cycle * SLOTS + slot][0] for slot in range(200))

    assert len({sources(0, 0), sources(0, 1), sources(1, 0), sources(1, 1)}) == 4


def test_mixing_does_not_change_between_versions() -> None:
    # A run saved today must continue with the same samples tomorrow: these numbers are part of the format.
    mixing = mixing_of([1, 2, 5], seed=7)
    assert (
        "".join(str(mixing[index][0]) for index in range(48))
        == "122222222022220212222222110022222210202200222212"
    )
    assert [mixing[index] for index in (4095, 4096, 10**12)] == [
        (2, 2559), (0, 512), (0, 125 * 10**9),
    ]  # fmt: skip


def test_one_source_has_the_indices_of_the_run() -> None:
    assert [mixing_of([3.0])[index] for index in (0, 5, 10**12)] == [(0, 0), (0, 5), (0, 10**12)]


@pytest.mark.parametrize("slots", [(), (SLOTS, 0), (1, 2), (-1, SLOTS + 1)])
def test_impossible_slots_are_refused(slots: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="slots: expected numbers from 1 that sum to 4096"):
        Mixing(slots, 0)


# ------------------------------------------------------------------------------
# Appended samples


@st.composite
def growing(draw: st.DrawFn) -> GrowingOrder:
    samples = size = draw(st.integers(1, 20))
    appended = []
    epoch = 0
    for _ in range(draw(st.integers(0, 4))):
        epoch += draw(st.integers(0, 2))
        more = draw(st.integers(1, 15))
        appended.append(Appended(epoch, size, size + more))
        size += more
    return GrowingOrder(samples, draw(st.integers(0, 2**32)), tuple(appended))


def sizes(order: GrowingOrder, epochs: int) -> list[int]:
    """Samples that each epoch visits."""
    return [
        max([order.samples, *(change.new for change in order.appended if change.epoch <= epoch)])
        for epoch in range(epochs)
    ]


@settings(max_examples=150, deadline=None)
@given(order=growing())
def test_every_epoch_visits_every_sample_once(order: GrowingOrder) -> None:
    index = 0
    for epoch, size in enumerate(sizes(order, 12)):
        visited = [order[index + place] for place in range(size)]
        assert sorted(visited) == list(range(size))
        assert {order.epoch(index + place) for place in range(size)} == {epoch}
        assert order.epochs(index) == epoch
        assert order.epochs(index + size // 2) == pytest.approx(epoch + (size // 2) / size)
        assert order.samples_of(Fraction(epoch)) == index
        assert order.samples_of(epoch + Fraction(size // 2, size)) == index + size // 2
        index += size


@settings(max_examples=150, deadline=None)
@given(order=growing())
def test_the_epoch_under_way_goes_on_as_it_was(order: GrowingOrder) -> None:
    for count, change in enumerate(order.appended):
        before = GrowingOrder(order.samples, order.seed, order.appended[:count])
        end = sum(sizes(before, change.epoch + 1))
        assert [order[index] for index in range(end)] == [before[index] for index in range(end)]
        after = {order[end + place] for place in range(change.new - change.old)}
        assert after == set(range(change.old, change.new))


def test_without_appended_samples_the_order_is_the_plain_one() -> None:
    plain, growing_order = SampleOrder(37, 5), GrowingOrder(37, 5)
    assert [growing_order[index] for index in range(200)] == [plain[index] for index in range(200)]
    assert growing_order.epochs(0) == 0.0 and growing_order.epochs(37 * 10**9) == 10**9


def test_an_append_history_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="size before"):
        GrowingOrder(10, 0, (Appended(0, 9, 12),))
    with pytest.raises(ValueError, match="ascending"):
        GrowingOrder(10, 0, (Appended(1, 10, 12), Appended(0, 12, 13)))
    with pytest.raises(ValueError, match="0 < old < new"):
        Appended(0, 5, 5)
