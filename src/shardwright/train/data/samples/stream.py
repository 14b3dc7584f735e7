"""The samples of a run, in order: a pure function of (settings, index of the sample).

A rank asks for the samples of its share of a global batch. Nothing here knows ranks, steps or micro-batches, so the
sequence cannot depend on them; a position in the data is one integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardwright.train.data.samples.batch import Batch, Rows
from shardwright.train.data.samples.mixing import Appended, GrowingOrder, Mixing, seed_of, slots_of
from shardwright.train.data.samples.packing import SamplePacking, Windows
from shardwright.train.data.tokens.tokens import Tokens
from shardwright.train.errors import UserError, counted

VALIDATION_PART = "the validation part of "
VALIDATION_SOURCE = "the validation source "
"""Begin the names of sources for validation: those that are split off, and those that are set."""


@dataclass(frozen=True, eq=False)
class Part:
    """Tokens and the samples made of them. Documents appended to a source are a part of their own."""

    tokens: Tokens
    packing: SamplePacking


@dataclass(frozen=True, eq=False)
class Source:
    """A source of samples. `parts` has one entry more than `appended`: the documents at the start."""

    name: str
    parts: tuple[Part, ...]
    appended: tuple[Appended, ...] = ()
    label: str = ""
    """The name in the table of a run's data. Empty: `name`."""

    def __post_init__(self) -> None:
        sizes = np.cumsum([len(part.packing) for part in self.parts]).tolist()
        changes = [(change.old, change.new) for change in self.appended]
        if changes != list(pairwise(sizes)):
            raise ValueError(
                f"{self.name}: expected appended parts to make {sizes} samples, found {self.appended}"
            )

    @cached_property
    def samples(self) -> int:
        return sum(len(part.packing) for part in self.parts)

    def place(self, sample: int) -> tuple[int, int]:
        """Return the part that holds a sample, and its number there."""
        for number, part in enumerate(self.parts):
            if sample < len(part.packing):
                return number, sample
            sample -= len(part.packing)
        raise IndexError(f"{self.name}: expected a sample below {self.samples}")

    def grown(self, part: Part, epoch: int) -> Source:
        """Return the source with samples appended in `epoch` of a run. The source itself where the part has no
        sample."""
        old, more = self.samples, len(part.packing)
        if not more:
            return self
        appended = (*self.appended, Appended(epoch, old, old + more))
        return replace(self, parts=(*self.parts, part), appended=appended)

    @property
    def trained(self) -> int:
        """Trained tokens of all samples."""
        return sum(int(part.packing.trained_counts.sum()) for part in self.parts)


class SampleOrigin(NamedTuple):
    """The origin of a sample of the run."""

    source: int
    part: int
    sample: int


class Stream:
    """The samples of weighted sources in the order of a run.

    `weights`: shares of the tokens of the run, one per source; only their proportions count. `seed`: of the order.
    `separate`: batches number their documents, for a model that keeps them apart; the packings must be made with the
    same value. Appended data does not change the proportions of a run.

    Raises UserError for a source without a sample or trained tokens, and for a weight that is too small.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        seed: int,
        *,
        separate: bool,
    ) -> None:
        self.sources = tuple(sources)
        self.separate = separate
        self.seq_len = self.sources[0].parts[0].packing.seq_len
        for source in self.sources:
            _check(source, self.seq_len)
        self.mixing = Mixing(_slots(self.sources, weights), seed)
        self._orders = [
            GrowingOrder(
                len(source.parts[0].packing), seed_of(seed, f"source {n}") if n else seed, source.appended
            )
            for n, source in enumerate(self.sources)
        ]

    def batch(self, first: int, count: int) -> Batch:
        """Samples `first` to `first + count - 1` of the run, in order."""
        rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for row in range(count):
            place = self.place(first + row)
            rows.setdefault((place.source, place.part), []).append((row, place.sample))
        result = Rows(count, self.seq_len, separate=self.separate)
        for (source, number), entries in rows.items():
            part = self.sources[source].parts[number]
            where, samples = np.array(entries, np.int64).T
            result.fill(where, part.tokens, part.packing, samples)
        return result.batch()

    def trained(self, first: int, count: int) -> int:
        """Targets that the loss counts in those samples. No token is read: about 10 µs per sample, and nothing where
        all samples of all sources have the same number."""
        if self._uniform is not None:
            return count * self._uniform
        total = 0
        for index in range(first, first + count):
            source, part, sample = self.place(index)
            total += int(self.sources[source].parts[part].packing.trained_counts[sample])
        return total

    def place(self, index: int) -> SampleOrigin:
        """Return the origin of sample `index` of the run. O(1)."""
        source, number = self.mixing[index]
        return SampleOrigin(source, *self.sources[source].place(self._orders[source][number]))

    def epochs(self, samples: int) -> list[float]:
        """Epochs of each source in the run's first `samples` samples. 1.5: every sample once, half of them twice."""
        return [
            order.epochs(count)
            for order, count in zip(self._orders, self.mixing.counts(samples), strict=True)
        ]

    def samples_of(self, epochs: Fraction) -> Fraction:
        """Return how many samples make `epochs` passes over the data.

        Each source is read once per pass; documents that were appended during the run count from the pass in which
        they arrived.
        """
        return sum((order.samples_of(epochs) for order in self._orders), Fraction())

    def shares(self) -> list[float]:
        """Return the part of the run's tokens, padding not counted, that comes from each source; the sum is 1."""
        tokens = [
            slots * tokens_per_sample(source)
            for slots, source in zip(self.mixing.slots, self.sources, strict=True)
        ]
        return [number / sum(tokens) for number in tokens]

    def epochs_under_way(self, samples: int) -> list[int]:
        """Return the epoch of each source that sample `samples` of the run, or the source's next after it, belongs to.
        An `Appended` that is made at this position has that epoch."""
        return [
            order.epoch(count) for order, count in zip(self._orders, self.mixing.counts(samples), strict=True)
        ]

    @cached_property
    def _uniform(self) -> int | None:
        """The trained targets of every sample, where they are the same number by construction."""
        counts = [part.packing.trained_counts for source in self.sources for part in source.parts]
        numbers = {int(each[0]) for each in counts if each.strides == (0,)}
        return numbers.pop() if len(numbers) == 1 and all(each.strides == (0,) for each in counts) else None


def tokens_per_sample(source: Source) -> float:
    """Positions without padding in a sample of the documents at the start. Appended documents do not count: they must
    not change the proportions of a run."""
    packing = source.parts[0].packing
    return packing.seq_len - packing.padding / len(packing)


def _slots(sources: Sequence[Source], weights: Sequence[float]) -> tuple[int, ...]:
    slots = slots_of(weights, [tokens_per_sample(source) for source in sources])
    for source, weight, number in zip(sources, weights, slots, strict=True):
        if number == 0:
            least = 100 / sum(slots)
            raise UserError(
                f"data.sources: expected a weight that gives {source.name} at least {least:.2g}% of the samples, found "
                f"{weight:g} of {sum(weights):g}; raise its weight or leave the source out"
            )
    return slots


def _check(source: Source, seq_len: int) -> None:
    for part in source.parts:
        if part.packing.seq_len != seq_len:
            raise ValueError(f"{source.name}: expected samples of {seq_len}, found {part.packing.seq_len}")
    if not source.samples:
        tokens = sum(len(part.tokens.ids) for part in source.parts)
        found = counted(tokens, "token")
        validates = source.name.startswith(VALIDATION_PART)
        if tokens < 2:
            raise UserError(
                f"train.seq_len: expected text for samples of {seq_len} tokens, found {found} in "
                f"{source.name}; {_way_to_samples(source) if validates else 'use more text'}"
            )
        if isinstance(source.parts[0].packing, Windows):
            use = "" if source.name.startswith((VALIDATION_PART, VALIDATION_SOURCE)) else " to train on"
            raise UserError(
                f"train.seq_len: expected at most {max(tokens - 1, 0)}, since {source.name} has {found}{use}, "
                f"found {seq_len}; {_way_to_samples(source)}"
            )
        check = "check the file and the key of its text"
        raise UserError(
            f"data.source: expected documents of at least two tokens in {source.name}, found {found} and no "
            f"such document; {_way_to_samples(source) if validates else check}"
        )
    if not source.trained:
        samples = counted(source.samples, "sample")
        raise UserError(
            f"data.source: expected trained tokens in {source.name}, found 0 in {samples}; for "
            "conversations, check that messages have the role assistant, and that train.seq_len reaches their answers"
        )


def _way_to_samples(source: Source) -> str:
    """Advice for a source that is too short."""
    if source.name.startswith(VALIDATION_PART):
        return "raise data.validation_fraction, set validation.every to 0, or use more text"
    if source.name.startswith(VALIDATION_SOURCE):
        return "use a shorter sequence or more text"
    return "use a shorter sequence or more text, or lower data.validation_fraction"
