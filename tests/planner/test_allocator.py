"""The model of PyTorch's caching allocator: each rule by itself, and invariants on random streams of allocations."""

from __future__ import annotations

import itertools
import random

import pytest

from shardwright.planner.allocator import MIB, CachingAllocator, OutOfMemoryError, Rules


def after(*sizes: int, rules: Rules | None = None) -> CachingAllocator:
    allocator = CachingAllocator(rules or Rules())
    for number, size in enumerate(sizes):
        allocator.take(number, size)
    return allocator


@pytest.mark.parametrize("nbytes, size", [(0, 512), (1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_sizes_are_multiples_of_512(nbytes: int, size: int) -> None:
    assert CachingAllocator().rounded(nbytes) == size


@pytest.mark.parametrize(
    "nbytes, size", [(1200, 1536), (5000, 5120), (1 << 20, 1 << 20), (1200 << 10, 1280 << 10)]
)
def test_sizes_are_rounded_to_divisions_of_powers_of_two(nbytes: int, size: int) -> None:
    """Above 512 bytes for each division: 1,200 KiB lie between 1 MiB and 2 MiB, whose quarters are 256 KiB."""
    assert CachingAllocator(Rules(divisions=4)).rounded(nbytes) == size


@pytest.mark.parametrize(
    "nbytes, reserved",
    [
        (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB), (33 * MIB, 34 * MIB),
    ],
)  # fmt: skip
def test_segments(nbytes: int, reserved: int) -> None:
    assert after(nbytes).now.reserved == reserved


def test_small_blocks_share_a_segment_and_large_ones_another() -> None:
    allocator = after(MIB, MIB, 4 * MIB, 4 * MIB)
    assert allocator.now.reserved == 22 * MIB
    allocator.take(9, 1)
    assert allocator.now.reserved == 24 * MIB  # the small segment is full; the large pool does not serve it


def test_streams_share_nothing() -> None:
    allocator = CachingAllocator()
    allocator.take(0, 12 * MIB, "one")
    allocator.give_back(0)
    allocator.take(1, 12 * MIB, "two")
    assert allocator.now.reserved == 24 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = after(40 * MIB, 20 * MIB)
    allocator.give_back(0)
    allocator.give_back(1)
    allocator.take(2, 18 * MIB)
    allocator.take(3, 40 * MIB)
    assert allocator.now.reserved == 60 * MIB


def test_a_large_block_is_split_only_if_more_than_one_mebibyte_is_left() -> None:
    allocator = after(20 * MIB)
    allocator.give_back(0)
    allocator.take(1, 19 * MIB)
    assert allocator.now.active == 20 * MIB
    allocator.give_back(1)
    allocator.take(2, 18 * MIB)
    assert allocator.now.active == 18 * MIB


def test_free_neighbours_become_one_block() -> None:
    allocator = after(12 * MIB)
    allocator.give_back(0)
    allocator.take(1, 4 * MIB)
    allocator.take(2, 4 * MIB)
    allocator.give_back(1)
    allocator.give_back(2)
    allocator.take(3, 12 * MIB)
    assert allocator.now.reserved == 12 * MIB


def test_blocks_above_max_split_stay_whole() -> None:
    allocator = after(100 * MIB, rules=Rules(max_split=50 * MIB))
    allocator.give_back(0)
    allocator.take(1, 30 * MIB)
    assert allocator.now.reserved == 130 * MIB
    allocator.take(2, 85 * MIB)  # less than 20 MiB would be lost
    assert allocator.now.reserved == 130 * MIB


def test_expandable_segments_grow_by_pages() -> None:
    allocator = after(30 * MIB, rules=Rules(expandable=True))
    assert allocator.now.reserved == 40 * MIB
    allocator.take(1, 30 * MIB)
    assert allocator.now.reserved == 60 * MIB
    allocator.give_back(1)
    allocator.take(2, 45 * MIB)  # the free end grows
    assert allocator.now.reserved == 80 * MIB


def test_an_empty_cache_is_tried_before_an_error() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.take(0, 60 * MIB)
    allocator.give_back(0)
    allocator.take(1, 80 * MIB)
    assert (allocator.now.reserved, allocator.retries) == (80 * MIB, 1)
    with pytest.raises(OutOfMemoryError) as raised:
        allocator.take(2, 40 * MIB)
    assert (raised.value.wanted, raised.value.active) == (40 * MIB, 80 * MIB)


def test_an_expandable_segment_gives_its_end_back_and_grows_again() -> None:
    allocator = CachingAllocator(Rules(expandable=True), limit=100 * MIB)
    allocator.take(0, 10 * MIB, "one")
    allocator.take(1, 50 * MIB, "one")
    allocator.give_back(1)
    allocator.take(2, 60 * MIB, "two")  # the end of the other segment goes back
    assert (allocator.now.reserved, allocator.retries) == (80 * MIB, 1)
    allocator.take(3, 15 * MIB, "one")
    assert allocator.now.reserved == 100 * MIB
    with pytest.raises(OutOfMemoryError):
        allocator.take(4, 20 * MIB, "one")
    allocator.give_back(0)
    allocator.give_back(3)
    allocator.take(5, 30 * MIB, "one")  # the free end is the whole segment
    assert allocator.now.reserved == 100 * MIB


def test_a_segment_grows_after_its_own_end_went_back() -> None:
    allocator = CachingAllocator(Rules(expandable=True), limit=100 * MIB)
    allocator.take(0, 10 * MIB)
    allocator.take(1, 30 * MIB)
    allocator.give_back(1)
    allocator.take(2, 80 * MIB)
    assert allocator.now.active == 90 * MIB
    assert allocator.now.reserved <= 100 * MIB


def test_garbage_collection_frees_the_oldest_segments() -> None:
    allocator = CachingAllocator(Rules(collect_above=0.5), limit=100 * MIB)
    for number in range(3):
        allocator.take(number, 20 * MIB)
    for number in range(3):
        allocator.give_back(number)
    allocator.take(3, 30 * MIB)
    assert allocator.now.reserved == 70 * MIB  # 60 were more than half, so one of 20 went


RULES = [Rules(), Rules(expandable=True), Rules(max_split=64 * MIB), Rules(divisions=8)]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(5))
def test_invariants(rules: Rules, seed: int) -> None:
    draw = random.Random(seed)
    allocator = CachingAllocator(rules)
    live: dict[int, int] = {}
    for number in range(2000):
        if live and draw.random() < 0.48:
            allocator.give_back(victim := draw.choice(list(live)))
            del live[victim]
        else:
            live[number] = int(10 ** draw.uniform(1, 8.3))
            allocator.take(number, live[number], draw.choice("ab"))
        now = allocator.now
        assert now.requested == sum(live.values()) <= now.active <= now.reserved
        ranges = sorted((b.address, b.address + b.size) for b, _ in allocator._used.values())
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    for number in live:
        allocator.give_back(number)
    assert (allocator.now.requested, allocator.now.active) == (0, 0)
    allocator.empty_cache()
    assert allocator.now.reserved == 0
