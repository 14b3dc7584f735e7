"""The order in which a run visits its samples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from shardwright.train.data.samples.mixing import SampleOrder


@settings(max_examples=60, deadline=None)
@given(windows=st.integers(1, 300), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 2**40))
def test_every_epoch_visits_every_window_once(windows: int, seed: int, epoch: int) -> None:
    order = SampleOrder(windows, seed)
    visited = [order[epoch * windows + position] for position in range(windows)]
    assert sorted(visited) == list(range(windows))


@pytest.mark.parametrize("windows", [1, 2, 3, 4, 5, 16, 17, 1024, 1025, 4096, 4097])
def test_permutation_is_whole_at_the_edges_of_its_domain(windows: int) -> None:
    order = SampleOrder(windows, seed=1)
    assert sorted(order[index] for index in range(windows)) == list(range(windows))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = [SampleOrder(100, seed=0)[index] for index in range(300)]
    epochs = {tuple(order[:100]), tuple(order[100:200]), tuple(order[200:])}
    other = tuple(SampleOrder(100, seed=1)[index] for index in range(100))
    assert len(epochs | {other, tuple(range(100))}) == 5


def test_order_does_not_change_between_versions() -> None:
    # A run saved today must continue with the same samples tomorrow: these numbers are part of the format.
    assert [SampleOrder(1000, seed=7)[index] for index in (0, 1, 2, 999, 1000, 10**12)] == [
        520, 153, 46, 375, 824, 716,
    ]  # fmt: skip


def test_windows_are_spread_evenly_over_an_epoch() -> None:
    # Over 400 orders each of 10 windows should come first about 40 times; 6 sigma of a binomial is 36.
    first = [SampleOrder(10, seed)[0] for seed in range(400)]
    assert all(4 <= first.count(window) <= 76 for window in range(10))


def test_huge_indices_and_corpora_work() -> None:
    assert 0 <= SampleOrder(10**12, seed=0)[2**62] < 10**12
    assert 0 <= SampleOrder(3, seed=0)[2**62] < 3
    assert SampleOrder(2**62, seed=0)[2**62 - 1] != SampleOrder(2**62, seed=0)[2**62]


def test_impossible_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 1, found 0"):
        SampleOrder(0, seed=0)
    with pytest.raises(IndexError, match="expected at least 0, found -1"):
        SampleOrder(1, seed=0)[-1]
