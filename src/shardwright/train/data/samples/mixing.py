"""The source of each sample of a run, and the order in which a source's samples are visited: functions of (settings,
index) and nothing else.

No state may live here. Because of that a position in the data is one integer, and a run that resumes, on any number of
ranks, goes on with the very same sequence. Nothing here knows tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from hashlib import blake2b, shake_128
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SLOTS = 4096
"""Samples of a cycle. In each cycle every source has exactly the same number of them."""


def slots_of(weights: Sequence[float], tokens_per_sample: Sequence[float]) -> tuple[int, ...]:
    """Return the samples of each source in a cycle, SLOTS in all, so that tokens have the proportions of `weights`.

    A source whose samples hold fewer tokens (because of padding) gets more samples. Rounded by largest remainder, in
    exact arithmetic. A source may get 0, where its weight is too small.
    """
    shares = [
        Fraction(weight) / Fraction(tokens) for weight, tokens in zip(weights, tokens_per_sample, strict=True)
    ]
    exact = [share * SLOTS / sum(shares) for share in shares]
    slots = [int(number) for number in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: (slots[source] - exact[source], source))
    for source in by_remainder[: SLOTS - sum(slots)]:
        slots[source] += 1
    return tuple(slots)


@dataclass(frozen=True)
class Mixing:
    """An endless sequence of (source, index in the source): the indices of each source count up from 0.

    The run is cut into cycles of SLOTS samples. Each cycle has an order of its own, keyed by (seed, cycle). An access
    costs O(1): the order of a cycle, about 0.2 ms, is computed once and kept for a while.
    """

    slots: tuple[int, ...]
    """Samples of each source per cycle; the sum is SLOTS."""
    seed: int

    def __post_init__(self) -> None:
        if sum(self.slots) != SLOTS or min(self.slots) < 1:
            raise ValueError(f"slots: expected numbers from 1 that sum to {SLOTS}, found {self.slots}")

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return the source of sample `index` of the run, and the sample's index in that source."""
        if index < 0:
            raise IndexError(f"index: expected at least 0, found {index}")
        if len(self.slots) == 1:
            return 0, index
        cycle, position = divmod(index, SLOTS)
        sources, ranks = _cycle(self.slots, self.seed, cycle)
        source = int(sources[position])
        return source, cycle * self.slots[source] + int(ranks[position])

    def counts(self, samples: int) -> tuple[int, ...]:
        """Return the number of samples from each source among the run's first `samples`."""
        if len(self.slots) == 1:
            return (samples,)
        cycle, position = divmod(samples, SLOTS)
        sources, _ = _cycle(self.slots, self.seed, cycle)
        begun = np.bincount(sources[:position], minlength=len(self.slots))
        return tuple(cycle * slots + int(number) for slots, number in zip(self.slots, begun, strict=True))


@lru_cache(maxsize=32)
def _cycle(slots: tuple[int, ...], seed: int, cycle: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each slot, and how many slots before it in the cycle have that source; int64 [SLOTS]
    each."""
    drawn = shake_128(f"{seed}/cycle {cycle}".encode()).digest(8 * SLOTS)
    order = np.argsort(np.frombuffer(drawn, "<u8"), kind="stable")
    sources = np.repeat(np.arange(len(slots)), slots)[order]
    ranks = np.empty(SLOTS, np.int64)
    firsts = np.cumsum([0, *slots[:-1]])
    ranks[np.argsort(sources, kind="stable")] = np.arange(SLOTS) - np.repeat(firsts, slots)
    return sources, ranks


def seed_of(seed: int, purpose: str) -> int:
    """Return a seed for one purpose, derived from the run's: 64 bits."""
    return int.from_bytes(blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Appended:
    """Samples that a source got while a run was in its epoch `epoch`: it had `old` of them, and has `new` since."""

    epoch: int
    old: int
    new: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or not 0 < self.old < self.new:
            raise ValueError(f"appended: expected epoch >= 0 and 0 < old < new, found {self}")


class _Stretch(NamedTuple):
    """Samples of a run that one permutation orders."""

    first: int  # index in the source
    epoch: int  # of the first one
    offset: int  # of the samples that it permutes
    samples: int  # how many these are
    seed: int


@dataclass(frozen=True)
class GrowingOrder:
    """The samples of a source in the order of a run: all of them once per epoch, as `SampleOrder` has them.

    Where samples are appended, the epoch under way visits the earlier samples in the same order as without them, and
    the appended ones afterwards. Later epochs visit all samples in one order.
    """

    samples: int
    """Samples at the start of the run."""
    seed: int
    appended: tuple[Appended, ...] = ()

    def __post_init__(self) -> None:
        sizes = [self.samples, *(change.new for change in self.appended)]
        if any(change.old != size for change, size in zip(self.appended, sizes, strict=False)):
            raise ValueError(
                f"appended: expected each `old` to be the size before, from {sizes[0]}, found {self}"
            )
        if any(later.epoch < earlier.epoch for earlier, later in pairwise(self.appended)):
            raise ValueError(f"appended: expected epochs in ascending order, found {self.appended}")

    def __getitem__(self, index: int) -> int:
        """Return the sample at `index`, counted from the start of the run."""
        stretch = self._stretch(index)
        order = SampleOrder(stretch.samples, stretch.seed)
        # The order is keyed by the epoch, which it derives from the index.
        return stretch.offset + order[stretch.epoch * stretch.samples + index - stretch.first]

    def epoch(self, index: int) -> int:
        """Return the epoch of the sample at `index`."""
        stretch = self._stretch(index)
        return stretch.epoch + (index - stretch.first) // stretch.samples

    def epochs(self, visited: int) -> float:
        """Return the epochs that the first `visited` samples are: whole ones, and the part of the one that is under
        way."""
        if not visited:
            return 0.0
        epoch = self.epoch(visited - 1)
        first = self._first_of(epoch)
        return epoch + (visited - first) / (self._first_of(epoch + 1) - first)

    def samples_of(self, epochs: Fraction) -> Fraction:
        """Return the number of samples in `epochs` epochs. The reverse of `epochs`."""
        whole = math.floor(epochs)
        first = self._first_of(whole)
        return first + (epochs - whole) * (self._first_of(whole + 1) - first)

    def _first_of(self, epoch: int) -> int:
        """Return the index at which an epoch starts."""
        whole = [stretch for stretch in self._stretches if stretch.offset == 0 and stretch.epoch <= epoch][-1]
        return whole.first + (epoch - whole.epoch) * whole.samples

    def _stretch(self, index: int) -> _Stretch:
        return self._stretches[bisect_right(self._stretches, index, key=lambda stretch: stretch.first) - 1]

    @cached_property
    def _stretches(self) -> list[_Stretch]:
        first, epoch, size = 0, 0, self.samples
        result = [_Stretch(0, 0, 0, size, self.seed)]
        for number, change in enumerate(self.appended):
            if change.epoch >= epoch:  # else in the epoch of the change before it, of which nothing is left
                first += (change.epoch + 1 - epoch) * size
                epoch = change.epoch + 1
            more = change.new - change.old
            seed = seed_of(self.seed, f"appended {number}")
            result.append(_Stretch(first, change.epoch, change.old, more, seed))
            first, size = first + more, change.new
            result.append(_Stretch(first, epoch, 0, size, self.seed))
        return result


_ROUNDS = 4  # Four rounds of a Feistel network give a pseudorandom permutation (Luby and Rackoff, 1988).


@dataclass(frozen=True)
class SampleOrder:
    """An endless sequence of window numbers that visits each of `windows` windows once per epoch.

    Each epoch has an order of its own: a Feistel network keyed by (seed, epoch) permutes the next power of
    four, and walks on from results that lie outside ("cycle walking", Black and Rogaway, 2002), in constant
    memory.
    """

    windows: int
    seed: int

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise ValueError(f"windows: expected at least 1, found {self.windows}")

    def __getitem__(self, index: int) -> int:
        """Return the window at `index`, counted from the start of the run: 0 <= result < windows."""
        if index < 0:
            raise IndexError(f"index: expected at least 0, found {index}")
        epoch, position = divmod(index, self.windows)
        key = f"{self.seed}/{epoch}".encode()
        half_bits = max(1, ((self.windows - 1).bit_length() + 1) // 2)
        while True:
            position = _feistel(position, half_bits, key)
            if position < self.windows:
                return position


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    """Return a permutation of the numbers of 2 x half_bits bits."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_round(key, turn, right) & mask)
    return left << half_bits | right


# An epoch of n windows has 4 n rounds, and only 8 sqrt(n) different ones at most. Kept results take 15 MB at most.
@lru_cache(maxsize=1 << 16)
def _round(key: bytes, turn: int, right: int) -> int:
    """Return a pseudorandom number of 64 bits."""
    digest = blake2b(turn.to_bytes(1) + right.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little")
