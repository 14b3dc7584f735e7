"""The model of PyTorch's caching allocator: each rule by itself, and invariants on random streams of allocations."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from shardwright.planner import Rules
from shardwright.planner.allocator import LARGE_SEGMENT, MIB, CachingAllocator, OutOfMemoryError


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


def test_settings() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:64, roundup_power2_divisions:8,"
        "garbage_collection_threshold:0.6, per_process_memory_fraction:0.9"
    )
    assert Rules.of({"PYTORCH_ALLOC_CONF": text}) == Rules(True, 64 * MIB, 8, 0.6, 0.9)
    for wrong in (
        "per_process_memory_fraction:1.5",
        "garbage_collection_threshold:x",
        "backend:cudaMallocAsync",
    ):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            Rules.of({"PYTORCH_ALLOC_CONF": wrong})


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


def with_free(
    *sizes: int, rules: Rules, limit: int | None = None, allowed: int | None = None
) -> CachingAllocator:
    """An allocator whose blocks of these sizes are free, the first one for the longest time."""
    allocator = CachingAllocator(rules, limit, allowed)
    for number, size in enumerate(sizes):
        allocator.take(number, size)
    for number in range(len(sizes)):
        allocator.give_back(number)
    return allocator


def test_garbage_collection_frees_the_oldest_segments() -> None:
    """Those that nobody took for at least the mean of searches, until no more is reserved than the threshold."""
    rules = Rules(collect_above=0.5)
    allocator = with_free(20 * MIB, 20 * MIB, 20 * MIB, rules=rules, allowed=100 * MIB)
    allocator.take(3, 30 * MIB)  # 60 were more than half, and all are as old
    assert (allocator.now.reserved, allocator.retries) == (30 * MIB, 0)
    allocator = with_free(20 * MIB, 22 * MIB, rules=rules, allowed=60 * MIB)
    allocator.take(5, 22 * MIB)
    allocator.give_back(5)  # the other one is older now
    allocator.take(6, 24 * MIB)
    assert allocator.now.reserved == 46 * MIB


def test_nothing_is_collected_without_a_fraction() -> None:
    allocator = with_free(20 * MIB, 22 * MIB, rules=Rules(collect_above=0.1), limit=100 * MIB)
    allocator.take(5, 30 * MIB)
    assert (allocator.now.reserved, allocator.retries) == (72 * MIB, 0)


def test_a_fraction_of_the_device_may_be_reserved() -> None:
    rules = Rules(fraction=0.5)
    allocator = CachingAllocator(rules, limit=100 * MIB, allowed=50 * MIB)
    allocator.take(0, 30 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.take(1, 22 * MIB)
    assert allocator.retries == 1


def test_split_segments_stay_when_the_cache_is_given_back() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.take(0, 60 * MIB)
    allocator.give_back(0)
    allocator.take(1, 10 * MIB)  # of the segment of 60
    allocator.take(2, 20 * MIB)
    allocator.give_back(2)
    with pytest.raises(OutOfMemoryError) as raised:
        allocator.take(3, 55 * MIB)
    assert raised.value.reserved == allocator.now.reserved == 60 * MIB
    allocator.give_back(1)
    allocator.take(3, 70 * MIB)
    assert (allocator.now.reserved, allocator.retries) == (70 * MIB, 2)


def test_all_streams_give_their_cache_back() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    for number, stream in enumerate("abc"):
        allocator.take(number, 20 * MIB, stream)
        allocator.take(9 + number, 512, stream)
        allocator.give_back(number)
        allocator.give_back(9 + number)
    assert allocator.now.reserved == 66 * MIB
    allocator.take(3, 40 * MIB, "a")
    assert (allocator.now.reserved, allocator.retries) == (40 * MIB, 1)


def test_a_block_that_may_not_be_split_is_given_back_first() -> None:
    """Without a wait for the device, and only of the stream; other free blocks stay."""
    rules = Rules(max_split=50 * MIB)
    allocator = with_free(20 * MIB, 60 * MIB, 80 * MIB, rules=rules, limit=170 * MIB)
    allocator.take(3, 30 * MIB)  # neither 60 nor 80 may be split for it: the smaller one goes
    assert (allocator.now.reserved, allocator.retries) == (130 * MIB, 0)
    allocator = with_free(20 * MIB, 60 * MIB, 80 * MIB, rules=rules, limit=170 * MIB)
    allocator.take(3, 120 * MIB)  # the largest ones go until they are as large together
    assert (allocator.now.reserved, allocator.retries) == (140 * MIB, 0)
    allocator = with_free(20 * MIB, 60 * MIB, rules=rules, limit=100 * MIB)
    allocator.take(3, 40 * MIB, "other")  # its stream has none, so all go
    assert (allocator.now.reserved, allocator.retries) == (40 * MIB, 1)


def test_pages_inside_a_free_block_go_back_and_come_again() -> None:
    """The first addresses that are free or without memory are used again, before those at the end."""
    allocator = CachingAllocator(Rules(expandable=True), limit=100 * MIB)
    for number in range(3):
        allocator.take(number, 30 * MIB)  # 0 to 30, 30 to 60 and 60 to 90 of five pages
    allocator.give_back(1)
    allocator.take(3, 20 * MIB, "other")  # the page from 40 to 60 goes
    assert (allocator.now.reserved, allocator.retries) == (100 * MIB, 1)
    allocator.give_back(3)
    allocator.take(4, 30 * MIB)  # from 30 on again, with that page
    assert (allocator.now.reserved, allocator.retries) == (100 * MIB, 2)
    allocator.take(5, 10 * MIB)  # the end of the fifth page
    assert allocator.now.active == allocator.now.reserved == 100 * MIB


def test_a_block_that_can_grow_counts_as_large() -> None:
    """So the free end of an expandable segment is taken last."""
    allocator = CachingAllocator(Rules(expandable=True))
    allocator.take(0, 35 * MIB)
    allocator.take(1, 15 * MIB)  # 10 are left at the end
    allocator.give_back(0)
    allocator.take(2, 8 * MIB)  # of the free 35
    allocator.take(3, 27 * MIB)
    assert allocator.now.reserved == 60 * MIB


def test_an_expandable_segment_without_memory_is_gone() -> None:
    allocator = with_free(30 * MIB, 5, rules=Rules(expandable=True))
    allocator.empty_cache()
    assert allocator.now.reserved == 0
    assert not any(pool.free or pool.unmapped for pool in allocator._pools.values())


def test_memory_of_a_graph_stays_with_it() -> None:
    """The cache is empty before a capture, and nothing is given back during one."""
    allocator = with_free(30 * MIB, rules=Rules(), limit=100 * MIB)
    allocator.take(1, 20 * MIB, "graph 1 capture")
    assert (allocator.now.reserved, allocator.retries) == (20 * MIB, 0)
    allocator.take(2, 10 * MIB, "capture")
    allocator.give_back(2)
    allocator.take(3, 20 * MIB, "graph 1 gather")
    assert allocator.now.reserved == 50 * MIB  # the cache of 10 stays now
    for number in (1, 3):
        allocator.give_back(number)
    allocator.take(4, 20 * MIB, "graph 1 capture")
    assert allocator.now.reserved == 50 * MIB
    with pytest.raises(OutOfMemoryError):
        allocator.take(5, 60 * MIB, "graph 1 capture")
    assert (allocator.now.reserved, allocator.retries) == (50 * MIB, 0)
    allocator.take(6, 60 * MIB)
    assert (allocator.now.reserved, allocator.retries) == (100 * MIB, 1)
    with pytest.raises(OutOfMemoryError):
        allocator.take(7, 1)
    assert allocator.now.reserved == 100 * MIB  # 20 of them are free, and the graph's


def test_the_peak_can_be_counted_again() -> None:
    allocator = after(30 * MIB, 30 * MIB)
    allocator.give_back(0)
    allocator.empty_cache()
    allocator.forget_peak()
    assert (allocator.peak.reserved, allocator.live_at_peak) == (30 * MIB, 30 * MIB)
    allocator.take(2, 12 * MIB)
    assert (allocator.peak.reserved, allocator.live_at_peak) == (42 * MIB, 42 * MIB)


RULES = [
    Rules(), Rules(expandable=True), Rules(max_split=64 * MIB), Rules(divisions=8),
    Rules(collect_above=0.6, fraction=0.9), Rules(expandable=True, fraction=0.9),
    Rules(max_split=64 * MIB, expandable=True),
]  # fmt: skip


@pytest.mark.parametrize("limit", [None, 2500 * MIB, 250 * MIB])
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_invariants(rules: Rules, limit: int | None, seed: int) -> None:
    draw = random.Random(seed)
    allowed = int(rules.fraction * limit) if limit and rules.fraction < 1 else None
    allocator = CachingAllocator(rules, limit, allowed)
    live: dict[int, int] = {}
    refused = 0
    for number in range(600):
        if live and draw.random() < 0.45:
            allocator.give_back(victim := draw.choice(list(live)))
            del live[victim]
        else:
            nbytes, stream = int(10 ** draw.uniform(1, 8.3)), draw.choice("ab")
            try:
                allocator.take(number, nbytes, stream)
                live[number] = nbytes
            except OutOfMemoryError as error:
                refused += 1
                # All that can be given back was: another try changes nothing.
                assert limit is not None and error.reserved == allocator.now.reserved
                free, retries = allocator.now.reserved, allocator.retries
                allocator.empty_cache()
                assert (allocator.now.reserved, allocator.retries) == (free, retries)
        now = allocator.now
        assert now.requested == sum(live.values()) <= now.active <= now.reserved
        assert limit is None or now.reserved <= limit
        # PyTorch asks before it rounds the size up to a page.
        assert allowed is None or now.reserved < allowed + (LARGE_SEGMENT if rules.expandable else 1)
        if number % 10 == 0:
            check_blocks(allocator)
    assert bool(refused) == (limit == 250 * MIB)
    for number in live:
        allocator.give_back(number)
    assert (allocator.now.requested, allocator.now.active) == (0, 0)
    allocator.empty_cache()
    assert allocator.now.reserved == 0


def check_blocks(allocator: CachingAllocator) -> None:
    """Blocks lie beside each other, none over another one, and all free ones are in their lists."""
    free = [block for pool in allocator._pools.values() for _, _, block in pool.free]
    bare = [block for pool in allocator._pools.values() for _, block in pool.unmapped]
    used = [block for block, _ in allocator.live.values()]
    assert all(each.is_mapped for each in (*free, *used)) and not any(each.is_mapped for each in bare)
    assert all(each.is_used for each in used) and not any(each.is_used for each in (*free, *bare))
    assert sum(each.size for each in (*free, *used)) == allocator.now.reserved
    ranges = sorted((each.address, each.address + each.size) for each in (*free, *used, *bare))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    everyone = {id(each) for each in (*free, *used, *bare)}
    for each in (*free, *used, *bare):
        behind = each.next
        if behind is not None:
            assert id(behind) in everyone and behind.previous is each
            assert behind.address == each.address + each.size
            assert (
                each.is_used or behind.is_used or each.is_mapped != behind.is_mapped
            )  # else they were one block
