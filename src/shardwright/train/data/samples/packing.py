"""SamplePacking: documents are cut and put together into samples of one length. Pure functions of document ends.

Positions are the common measure. Position p of the row of tokens has input ids[p] and target ids[p + 1], so a document
of n tokens has n - 1 positions whose target is its own. A sample has `seq_len` positions.

Nothing here reads token ids or knows the order in which samples are visited.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.train.data.tokens.tokens import Tokens

PackingName = Literal["split", "best_fit", "none"]
Integers = NDArray[np.int64]


class Pieces(NamedTuple):
    """Parts of documents that fill some samples, sample by sample; int64 [pieces] each."""

    rows: Integers
    """Index of the sample among those asked for; ascending."""
    starts: Integers
    """First position of the piece in the row of tokens."""
    inputs: Integers
    """Positions of the piece; at least 1."""
    targets: Integers
    """Number of positions with a target, from the first on. One fewer than `inputs` where the next token belongs to
    another document, which a target must not cross into; otherwise as many."""


class SamplePacking(Protocol):
    """Samples of `seq_len` positions, by number."""

    @property
    def seq_len(self) -> int: ...

    @property
    def trained_counts(self) -> Integers:
        """[samples]: targets that the loss counts."""
        ...

    @property
    def padding(self) -> int:
        """Positions of all samples that no document fills."""
        ...

    @property
    def truncated(self) -> int:
        """Tokens that no sample holds as a target, because they did not fit."""
        ...

    def __len__(self) -> int: ...

    def pieces(self, samples: Integers) -> Pieces:
        """Pieces of the samples with these numbers, int64 [rows]. O(pieces), and at most O(log documents) a sample."""
        ...


@dataclass(frozen=True, eq=False)
class Windows:
    """Sample n is the positions [n * seq_len, (n + 1) * seq_len) of the tokens, whatever documents they cross."""

    seq_len: int
    ends: Integers | None
    """Ends of the documents, where targets must not cross from one into the next. None: they do, as in one text."""
    trained_counts: Integers
    truncated: int
    padding: int = 0

    def __len__(self) -> int:
        return len(self.trained_counts)

    def pieces(self, samples: Integers) -> Pieces:
        size = self.seq_len
        begins = samples * size
        if self.ends is None:
            lengths = np.full(len(samples), size)
            return Pieces(np.arange(len(samples)), begins, lengths, lengths)
        first = np.searchsorted(self.ends, begins, side="right")
        counts = np.searchsorted(self.ends, begins + size - 1, side="right") - first + 1
        rows = np.repeat(np.arange(len(samples)), counts)
        documents = np.repeat(first, counts) + _count_up(counts)
        stops = self.ends[documents]
        starts = np.where(documents > 0, self.ends[documents - 1], 0)
        row_begins = begins[rows]
        starts = np.maximum(starts, row_begins)
        last = np.minimum(stops, row_begins + size)
        lengths = last - starts
        table = Pieces(rows, starts, lengths, lengths - (last == stops))
        kept = lengths > 0  # a document without tokens is no piece
        return Pieces(*(column[kept] for column in table))


@dataclass(frozen=True, eq=False)
class Packed:
    """Sample n is the pieces bounds[n] to bounds[n + 1] - 1, then padding. No piece crosses a document's end."""

    seq_len: int
    bounds: Integers
    """[samples + 1]"""
    starts: Integers
    """[pieces]: first position."""
    lengths: Integers
    """[pieces]: positions, every one with a target."""
    trained_counts: Integers
    truncated: int

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def padding(self) -> int:
        return len(self) * self.seq_len - int(self.lengths.sum())

    def pieces(self, samples: Integers) -> Pieces:
        first = self.bounds[samples]
        counts = self.bounds[samples + 1] - first
        index = np.repeat(first, counts) + _count_up(counts)
        lengths = self.lengths[index]
        return Pieces(np.repeat(np.arange(len(samples)), counts), self.starts[index], lengths, lengths)


def pack(tokens: Tokens, seq_len: int, packing: PackingName, *, separate: bool) -> SamplePacking:
    """Samples of `seq_len` positions out of documents.

    `separate`: no target crosses from a document into the next. The end token of a document is a target of that
    document; the first token of a document never is one, since no token of its own comes before it. Without `separate`
    (`split` alone) the documents are one text, and the first token of a document is the target of the last token of
    the one before.

    A piece is the context of its tokens: a document that is longer than `seq_len` is cut, and the later pieces do not
    see the earlier ones. Pieces overlap by one token, which is the last target of one and the first input of the next,
    so each token but a document's first is a target once.

    Memory: `split` none but the counts, and those only with `separate` or `tokens.trained`; the others 4 to 6 times 8
    bytes per piece while they run, 2 times 8 afterwards, and 16 per sample.
    """
    if packing == "split":
        return split(tokens, seq_len, separate=separate)
    return best_fit(tokens, seq_len) if packing == "best_fit" else one_per_sample(tokens, seq_len)


def split(tokens: Tokens, seq_len: int, *, separate: bool = False) -> Windows:
    """Windows of the row of tokens, one after the other; the remainder, shorter than a window, is truncated."""
    positions = max(len(tokens.ids) - 1, 0)
    samples = positions // seq_len
    counts = _trained_in_windows(tokens.trained, samples, seq_len)
    if separate:
        # The position before an end has the next document's first token as its target.
        ends = np.unique(tokens.ends)
        inner = ends[(ends > 0) & (ends <= samples * seq_len)]
        if tokens.trained is not None:
            inner = inner[tokens.trained[inner] != 0]
        counts = counts - np.bincount((inner - 1) // seq_len, minlength=samples)
    return Windows(seq_len, tokens.ends if separate else None, counts, positions - samples * seq_len)


def one_per_sample(tokens: Tokens, seq_len: int) -> Packed:
    """Return a document per sample, cut to `seq_len` positions. A document of fewer than two tokens has no sample."""
    begins, positions = _documents(tokens.ends)
    lengths = np.minimum(positions, seq_len)
    counts = _trained(tokens.trained, begins, lengths)
    truncated = int(positions.sum() - lengths.sum())
    return Packed(seq_len, np.arange(len(begins) + 1), begins, lengths, counts, truncated)


def best_fit(tokens: Tokens, seq_len: int) -> Packed:
    """Pieces of at most `seq_len` positions, the longest first, each into the fullest sample that has room for it.

    The result depends on the ends alone, and is the same on every machine. A document of fewer than two tokens has
    no piece. O(n log n) for n pieces, in NumPy: groups of pieces of one length are placed together.
    """
    begins, positions = _documents(tokens.ends)
    counts = -(-positions // seq_len)
    starts = np.repeat(begins, counts) + _count_up(counts) * seq_len
    lengths = np.full(len(starts), seq_len)
    lengths[np.cumsum(counts) - 1] = positions - (counts - 1) * seq_len
    trained = _trained(tokens.trained, starts, lengths)
    sample_of, samples = assign(lengths, seq_len)
    order = np.argsort(sample_of, kind="stable")  # pieces of a sample stay in the order of the documents
    bounds = np.concatenate([[0], np.cumsum(np.bincount(sample_of, minlength=samples))])
    sums = np.add.reduceat(trained[order], bounds[:-1]) if samples else trained
    return Packed(seq_len, bounds, starts[order], lengths[order], sums, truncated=0)


def assign(lengths: Integers, room: int) -> tuple[Integers, int]:
    """Best-fit-decreasing: the sample of each piece, int64 [pieces], and the number of samples.

    `lengths`: int64 [pieces], each from 1 to `room`. Pieces of equal length go in order. A sample that takes a piece
    stays the fullest one with room while it has room for another of that length, so it takes as many as it can: one
    operation places a whole group into samples of equal room.
    """
    order = np.argsort(lengths, kind="stable")
    counts = np.bincount(lengths, minlength=room + 1)
    firsts = np.cumsum(counts) - counts
    sample_of = np.empty(len(lengths), np.int64)
    open_samples: list[deque[Integers]] = [deque() for _ in range(room + 1)]  # by room left
    rooms = 0  # bit r is set where open_samples[r] is not empty
    samples = 0

    def keep(numbers: Integers, left: int) -> None:
        nonlocal rooms
        if len(numbers) and left:
            open_samples[left].appendleft(numbers)
            rooms |= 1 << left

    for length in np.flatnonzero(counts)[::-1].tolist():
        group = order[firsts[length] : firsts[length] + counts[length]]
        while len(group):
            fitting = rooms >> length
            if fitting:
                left = length + (fitting & -fitting).bit_length() - 1
                numbers = open_samples[left].popleft()
                if not open_samples[left]:
                    rooms ^= 1 << left
            else:
                left = room
                more = -(-len(group) // (room // length))
                numbers = np.arange(samples, samples + more)
                samples += more
            each = left // length
            used = min(len(numbers), -(-len(group) // each))
            placed = min(used * each, len(group))
            sample_of[group[:placed]] = np.repeat(numbers[:used], each)[:placed]
            group = group[placed:]
            keep(numbers[used:], left)
            keep(numbers[: used - 1], left - each * length)
            keep(numbers[used - 1 : used], left - (placed - (used - 1) * each) * length)
    return sample_of, samples


def _documents(ends: Integers) -> tuple[Integers, Integers]:
    """First position and number of positions of each document that has one."""
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
    positions = ends - begins - 1
    kept = positions > 0
    return begins[kept], positions[kept]


def _count_up(counts: Integers) -> Integers:
    """0, 1, ... counts[0] - 1, then 0, 1, ... counts[1] - 1, and so on."""
    total = int(counts.sum())
    return np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)


_CHUNK = 1 << 20  # flags counted at once


def _trained_in_windows(flags: NDArray[Any] | None, samples: int, seq_len: int) -> Integers:
    """Trained targets of windows, int64 [samples]."""
    if flags is None:
        return np.broadcast_to(np.int64(seq_len), samples)  # one number in memory, for any number of windows
    counts = np.empty(samples, np.int64)
    step = max(1, _CHUNK // seq_len)
    for first in range(0, samples, step):
        last = min(first + step, samples)
        part = flags[first * seq_len + 1 : last * seq_len + 1].reshape(last - first, seq_len)
        counts[first:last] = np.count_nonzero(part, axis=1)
    return counts


def _trained(flags: NDArray[Any] | None, starts: Integers, lengths: Integers) -> Integers:
    """Trained targets of pieces, int64 [pieces]. Pieces come in the order of their starts and do not overlap."""
    if flags is None:
        return lengths
    counts = np.empty(len(starts), np.int64)
    first = 0
    while first < len(starts):
        # A sum takes 8 bytes per flag, so a chunk is measured in flags. It has at least one piece.
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + _CHUNK)))
        begins = starts[first:last] + 1
        stops = begins + lengths[first:last]
        origin = begins[0]
        part = np.append(flags[origin : stops[-1]] != 0, False)  # a sum may start at the last stop, then
        edges = np.stack([begins, stops], axis=1).ravel() - origin
        counts[first:last] = np.add.reduceat(part, edges, dtype=np.int64)[::2]
        first = last
    return counts
