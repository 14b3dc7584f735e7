"""The sequence of samples of a run: the same tokens in the same order, however they are divided.

The test that matters compares the stream itself. Ranks are simulated in one process: each makes its contiguous share
of every global batch, as the trainer does, and the shares in the order of the ranks are the global batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from shardwright.train.data.samples.batch import IGNORED, Batch
from shardwright.train.data.samples.loader import Loader, Share
from shardwright.train.data.samples.mixing import SLOTS, Appended, SampleOrder
from shardwright.train.data.samples.packing import PackingName, pack
from shardwright.train.data.samples.stream import Part, Source, Stream
from shardwright.train.data.tokens.tokens import Tokens
from shardwright.train.errors import UserError
from tests.train.kit.text import Text, batch
from tests.train.kit.tokens import random_tokens, source_of, tokens_of

SEQ_LEN, GLOBAL, STEPS = 16, 24, 12
SETTINGS: list[tuple[PackingName, bool]] = [
    ("split", False),
    ("split", True),
    ("best_fit", True),
    ("none", False),
]


class Leg(NamedTuple):
    """Steps that a run does with one number of ranks."""

    steps: int
    ranks: int
    micro_batch: int
    workers: int


#: Runs of STEPS steps; each leg after the first is a resume.
PLANS = [
    *([Leg(STEPS, ranks, micro, workers)] for ranks, micro, workers in [(1, 24, 1), (2, 3, 2), (3, 8, 0), (4, 2, 1)]),
    [Leg(5, 1, 8, 1), Leg(7, 4, 3, 0)],
    [Leg(1, 4, 6, 2), Leg(11, 3, 1, 1)],
    [Leg(11, 3, 4, 0), Leg(1, 2, 12, 3)],
    [Leg(2, 2, 4, 3), Leg(3, 3, 2, 1), Leg(3, 1, 1, 2), Leg(4, 4, 1, 0)],
]  # fmt: skip


@cache
def stream_of(kind: str, packing: PackingName, separate: bool) -> Stream:
    """kind: one source, several, or several of which one was appended to in its first epoch and in its third."""

    def part(seed: int, documents: int, masked: bool = False) -> Part:
        tokens = random_tokens(seed, documents, longest=40, masked=masked, first_id=1000 * seed + 1)
        return Part(tokens, pack(tokens, SEQ_LEN, packing, separate=separate))

    if kind == "one":
        return Stream([Source("a", (part(1, 40),))], [1.0], 11, separate=separate)
    first = Source("a", (part(1, 9),))
    if kind == "appended":
        first = first.grown(part(2, 8), epoch=0).grown(part(3, 5), epoch=2)
    others = [Source("b", (part(4, 30, masked=True),)), Source("c", (part(5, 12),))]
    return Stream([first, *others], [0.5, 0.2, 0.3], 11, separate=separate)


def tensors_of(batch: Batch) -> Iterator[torch.Tensor]:
    return (t for t in (batch.inputs, batch.targets, batch.documents, batch.positions) if t is not None)


def digest(rows: Iterable[Batch]) -> str:
    """The digest of all rows in order, whatever batches they come in."""
    hashed = hashlib.sha256()
    for each in rows:
        for row in zip(*tensors_of(each), strict=True):
            for tensor in row:
                hashed.update(tensor.numpy().tobytes())
    return hashed.hexdigest()


def run(stream: Stream, plan: list[Leg]) -> Iterator[Batch]:
    """The micro-batches of all ranks in the order of the global stream."""
    done = 0
    for leg in plan:
        first, stop = done * GLOBAL, (done + leg.steps) * GLOBAL
        loaders = [
            Loader(
                stream,
                Share(GLOBAL, leg.micro_batch, rank, leg.ranks),
                first=first,
                stop=stop,
                workers=leg.workers,
            )
            for rank in range(leg.ranks)
        ]
        for steps in zip(*loaders, strict=True):
            assert {step.first for step in steps} == {done * GLOBAL}
            batches = [batch for step in steps for batch in step.batches]
            trained = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
            assert {step.trained for step in steps} == {trained}
            yield from batches
            done += 1
        for loader in loaders:
            loader.close()
    assert done == STEPS


@cache
def expected(kind: str, packing: PackingName, separate: bool) -> str:
    """One sample at a time, the last one first: no state can help."""
    stream = stream_of(kind, packing, separate)
    return digest(reversed([stream.batch(index, 1) for index in reversed(range(STEPS * GLOBAL))]))


@pytest.mark.extensive("each packing", but=("split-*",))
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "+".join("x".join(map(str, leg)) for leg in plan))
@pytest.mark.parametrize("kind", ["one", "mixed", "appended"])
@pytest.mark.parametrize(("packing", "separate"), SETTINGS)
def test_the_stream_does_not_depend_on_its_division(
    packing: PackingName, separate: bool, kind: str, plan: list[Leg]
) -> None:
    assert digest(run(stream_of(kind, packing, separate), plan)) == expected(kind, packing, separate)


def test_the_combinations_are_many_and_their_streams_differ() -> None:
    combinations = list(product(["one", "mixed", "appended"], SETTINGS))
    assert len(combinations) * len(PLANS) >= 60
    assert len({expected(kind, *setting) for kind, setting in combinations}) == len(combinations)
    assert all(sum(leg.steps for leg in plan) == STEPS for plan in PLANS)
    epochs = stream_of("appended", "best_fit", True).epochs(STEPS * GLOBAL)
    assert epochs[0] > 3  # beyond the epoch that the last samples are appended in


def test_streams_do_not_change_between_versions() -> None:
    # A run saved today must continue with the same samples tomorrow: these numbers are part of the format.
    assert [expected(kind, *setting)[:12] for kind, setting in product(["one", "appended"], SETTINGS)] == [
        "2db88926c80d", "26bc786312fb", "e2d8481a4fda", "9e86a2d3d6cc",
        "fc111e2816a2", "5f3e2a1e1bb5", "599b82224a48", "a1a6647ac790",
    ]  # fmt: skip


# ------------------------------------------------------------------------------
# As a text of bytes has them


@pytest.mark.parametrize("seed", [0, 5, 2**40])
@pytest.mark.parametrize("separate", [False, True])
def test_windows_of_one_text_are_those_of_the_text(seed: int, separate: bool) -> None:
    text = torch.randint(0, 256, (5003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tokens = Tokens(text.numpy(), np.array([len(text)]), None, "")
    stream = Stream([source_of(tokens, 32, "split", separate=separate)], [1.0], seed, separate=separate)
    plain = Text(text, text[:0])
    for first, count in [(0, 8), (150, 40), (10**12, 3)]:
        inputs, targets = batch(plain, seed, first, count, 32)
        ours = stream.batch(first, count)
        assert torch.equal(ours.inputs, inputs) and torch.equal(ours.targets, targets)
        assert stream.trained(first, count) == count * 32


def test_windows_of_several_documents_are_those_of_their_text() -> None:
    text = torch.randint(0, 256, (900,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tokens = Tokens(text.numpy(), np.array([100, 100, 350, 899, 900]), None, "")
    stream = Stream([source_of(tokens, 16, "split", separate=False)], [1.0], 3, separate=False)
    inputs, targets = batch(Text(text, text[:0]), 3, 40, 60, 16)
    assert torch.equal(stream.batch(40, 60).inputs, inputs)
    assert torch.equal(stream.batch(40, 60).targets, targets)


# ------------------------------------------------------------------------------
# Sources


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_every_sample_of_every_source_once_per_epoch(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    weights = [data.draw(st.floats(0.1, 10)) for _ in sizes]
    sources = [
        source_of(tokens_of([5] * size), 4, "none", separate=False, name=str(n))
        for n, size in enumerate(sizes)
    ]
    stream = Stream(sources, weights, seed, separate=False)
    visits: list[list[int]] = [[] for _ in sizes]
    for index in range(400):
        place = stream.place(index)
        visits[place.source].append(place.sample)
    for size, visited in zip(sizes, visits, strict=True):
        for first in range(0, len(visited) - size + 1, size):
            assert sorted(visited[first : first + size]) == list(range(size))
    assert stream.epochs(400) == pytest.approx([len(v) / size for v, size in zip(visits, sizes, strict=True)])


def test_sources_of_one_size_do_not_share_an_order() -> None:
    sources = [source_of(tokens_of([5] * 50), 4, "none", separate=False) for _ in range(2)]
    stream = Stream(sources, [1, 1], 0, separate=False)
    visits: list[list[int]] = [[], []]
    for index in range(100):
        place = stream.place(index)
        visits[place.source].append(place.sample)
    shortest = min(map(len, visits))
    assert visits[0][:shortest] != visits[1][:shortest]


def test_weights_are_shares_of_tokens_not_of_samples() -> None:
    full, half = tokens_of([17] * 30), tokens_of([9] * 30)  # 16 and 8 positions of 16
    sources = [source_of(tokens, 16, "none", separate=False) for tokens in (full, half)]
    stream = Stream(sources, [1, 1], 0, separate=False)
    counts = Counter(stream.place(index).source for index in range(SLOTS))
    assert abs(16 * counts[0] - 8 * counts[1]) < 16
    assert stream.shares() == pytest.approx([0.5, 0.5], abs=1 / SLOTS)


def test_trained_counts_every_sample_in_a_range() -> None:
    stream = stream_of("mixed", "best_fit", True)
    for first, count in [(0, 1), (7, 40), (SLOTS - 5, 10), (10**9, 33)]:
        assert stream.trained(first, count) == int((stream.batch(first, count).targets != IGNORED).sum())


def test_counting_reads_no_token() -> None:
    tokens = random_tokens(1, documents=50, longest=30, masked=True)
    source = source_of(tokens, 16, "best_fit", separate=True)
    expected_count = Stream([source], [1], 0, separate=True).trained(0, 20)
    gone = Tokens(tokens.ids[:0], tokens.ends[:0], None, "")
    assert (
        Stream([Source("a", (Part(gone, source.parts[0].packing),))], [1], 0, separate=True).trained(0, 20)
        == expected_count
    )


# ------------------------------------------------------------------------------
# Appended samples


@pytest.mark.parametrize(("packing", "separate"), SETTINGS)
@pytest.mark.parametrize("at", [0, 3, 500, 2000])
def test_appended_data_leaves_the_past_and_the_epoch_under_way(
    packing: PackingName, separate: bool, at: int
) -> None:
    old = stream_of("mixed", packing, separate)
    epoch = old.epochs_under_way(at)[1]
    tokens = random_tokens(9, 25, longest=40, first_id=50_001)
    part = Part(tokens, pack(tokens, SEQ_LEN, packing, separate=separate))
    sources = [old.sources[0], old.sources[1].grown(part, epoch), old.sources[2]]
    new = Stream(sources, [0.5, 0.2, 0.3], 11, separate=separate)
    assert new.mixing == old.mixing
    seen, later = 0, []
    for index in range(at + 1500):
        before, after = old.place(index), new.place(index)
        if before.source != 1 or seen < (epoch + 1) * old.sources[1].samples:
            assert after == before
        else:
            later.append((after.part, after.sample))
        seen += before.source == 1
    more, everything = len(part.packing), sources[1].samples
    assert sorted(later[:more]) == [(1, sample) for sample in range(more)]
    assert len(set(later[more : more + everything])) == everything


def test_a_part_without_a_sample_appends_nothing() -> None:
    source = source_of(tokens_of([20]), 4, "none", separate=False)
    tokens = tokens_of([1])
    assert source.grown(Part(tokens, pack(tokens, 4, "none", separate=False)), epoch=3) is source


def test_parts_and_their_history_belong_together() -> None:
    tokens = tokens_of([20])
    part = Part(tokens, pack(tokens, 4, "best_fit", separate=True))
    with pytest.raises(ValueError, match="appended parts"):
        Source("a", (part, part))
    with pytest.raises(ValueError, match="appended parts"):
        Source("a", (part, part), (Appended(0, 5, 9),))


# ------------------------------------------------------------------------------
# What cannot be trained on


def test_a_source_shorter_than_a_sample_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"train.seq_len: expected at most 4, since small.txt has 5 tokens to train on, found 16",
    ):
        Stream(
            [source_of(tokens_of([5]), 16, "split", separate=False, name="small.txt")], [1], 0, separate=False
        )
    with pytest.raises(UserError, match=r"at least two tokens in small.txt, found 3 tokens"):
        Stream(
            [source_of(tokens_of([1] * 3), 4, "none", separate=False, name="small.txt")],
            [1],
            0,
            separate=False,
        )


def test_a_source_without_trained_tokens_is_refused() -> None:
    sources = [
        source_of(tokens_of([9]), 4, "best_fit", separate=True),
        source_of(tokens_of([9], trained=[1] + [0] * 8), 4, "best_fit", separate=True, name="chat.jsonl"),
    ]
    Stream(sources[:1], [1], 0, separate=True)
    with pytest.raises(UserError, match=r"expected trained tokens in chat\.jsonl, found 0 in 2 samples"):
        Stream(sources, [1, 1], 0, separate=True)


def test_a_weight_too_small_for_a_share_is_refused() -> None:
    sources = [source_of(tokens_of([9]), 4, "split", separate=False, name=name) for name in ("a", "b")]
    with pytest.raises(
        UserError, match=r"data.sources: expected a weight that gives b at least 0.024% .* found 1e-05"
    ):
        Stream(sources, [1, 1e-5], 0, separate=False)


def test_orders_of_one_source_are_those_of_the_run() -> None:
    stream = stream_of("one", "split", False)
    order = SampleOrder(stream.sources[0].samples, 11)
    assert [stream.place(index).sample for index in range(100)] == [order[index] for index in range(100)]
