"""Documents as samples: nothing is lost without being counted, and nothing comes twice."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from shardwright.train.data.samples import packing as packing_module
from shardwright.train.data.samples.batch import IGNORED, Batch, Rows
from shardwright.train.data.samples.packing import PackingName, SamplePacking, assign, best_fit, pack, split
from shardwright.train.data.tokens.tokens import Tokens
from tests.train.kit.tokens import random_tokens, tokens_of

PACKINGS: list[tuple[PackingName, bool]] = [
    ("split", False),
    ("split", True),
    ("best_fit", True),
    ("none", True),
]


@st.composite
def documents(draw: st.DrawFn) -> Tokens:
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=25))
    masked = draw(st.booleans())
    flags = (
        draw(st.lists(st.integers(0, 1), min_size=sum(lengths), max_size=sum(lengths))) if masked else None
    )
    return tokens_of(lengths, flags)


def batch_of(tokens: Tokens, packing: SamplePacking, *, separate: bool = True) -> Batch:
    """All samples in order."""
    rows = Rows(len(packing), packing.seq_len, separate=separate)
    everything = np.arange(len(packing))
    rows.fill(everything, tokens, packing, everything)
    return rows.batch()


def targets_of(batch: Batch) -> list[int]:
    """The ids that are targets, with repetition."""
    return sorted(batch.targets[batch.targets != IGNORED].tolist())


def expected_targets(tokens: Tokens, *, separate: bool) -> list[int]:
    """Ids of all tokens that may be a target: but the first of the text, or of each document."""
    ids = tokens.ids.tolist()
    firsts = {0} | ({int(end) for end in tokens.ends} if separate else set())
    flags = [1] * len(ids) if tokens.trained is None else tokens.trained.tolist()
    return [token for place, token in enumerate(ids) if place not in firsts and flags[place]]


def reference(tokens: Tokens, seq_len: int) -> list[Counter[int]]:
    """Best-fit-decreasing by its definition: rooms of the samples after each piece."""
    pieces = []
    for length in np.diff(tokens.ends, prepend=0).tolist():
        positions = max(length - 1, 0)
        pieces += [seq_len] * (positions // seq_len) + [positions % seq_len] * (positions % seq_len > 0)
    rooms: list[int] = []
    history = []
    for piece in sorted(pieces, reverse=True):
        fitting = [room for room in rooms if room >= piece]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else seq_len) - piece)
        history.append(Counter(rooms))
    return history


# ------------------------------------------------------------------------------
# Every token once


@settings(max_examples=150, deadline=None)
@given(tokens=documents(), seq_len=st.integers(1, 12))
def test_best_fit_trains_every_token_once(tokens: Tokens, seq_len: int) -> None:
    packing = best_fit(tokens, seq_len)
    batch = batch_of(tokens, packing)
    assert targets_of(batch) == expected_targets(tokens, separate=True)
    assert packing.truncated == 0


@settings(max_examples=150, deadline=None)
@given(tokens=documents(), seq_len=st.integers(1, 12), separate=st.booleans())
def test_split_trains_every_token_once_but_the_remainder(
    tokens: Tokens, seq_len: int, separate: bool
) -> None:
    packing = split(tokens, seq_len, separate=separate)
    batch = batch_of(tokens, packing, separate=separate)
    assert 0 <= packing.truncated < seq_len
    last = len(tokens.ids) - packing.truncated
    assert targets_of(batch) == [
        token for token in expected_targets(tokens, separate=separate) if token <= max(last, 1)
    ]
    assert packing.padding == 0
    assert batch.inputs.flatten().tolist() == tokens.ids[: len(packing) * seq_len].tolist()


@settings(max_examples=100, deadline=None)
@given(tokens=documents(), seq_len=st.integers(1, 12))
def test_one_document_per_sample_counts_the_tokens_it_cuts_off(tokens: Tokens, seq_len: int) -> None:
    packing = pack(tokens, seq_len, "none", separate=True)
    lengths = [n for n in np.diff(tokens.ends, prepend=0).tolist() if n > 1]
    assert len(packing) == len(lengths)
    assert packing.truncated == sum(max(0, n - 1 - seq_len) for n in lengths)
    batch = batch_of(tokens, packing)
    cut_off = [
        range(end - max(0, n - 1 - seq_len) + 1, end + 1)
        for n, end in zip(np.diff(tokens.ends, prepend=0).tolist(), tokens.ends.tolist(), strict=True)
    ]
    gone = {token for tokens_cut in cut_off for token in tokens_cut}
    assert targets_of(batch) == [t for t in expected_targets(tokens, separate=True) if t not in gone]


@pytest.mark.parametrize(("name", "separate"), PACKINGS)
@settings(max_examples=60, deadline=None)
@given(tokens=documents(), seq_len=st.integers(1, 12))
def test_counts_are_what_batches_hold(
    name: PackingName, separate: bool, tokens: Tokens, seq_len: int
) -> None:
    packing = pack(tokens, seq_len, name, separate=separate)
    batch = batch_of(tokens, packing, separate=separate)
    trained = (batch.targets != IGNORED).sum(dim=1)
    assert packing.trained_counts.tolist() == trained.tolist()
    padding = int((batch.inputs == 0).sum())  # no token has id 0
    assert packing.padding == padding
    assert batch.inputs.shape == batch.targets.shape == (len(packing), seq_len)


@pytest.mark.parametrize(("name", "separate"), PACKINGS)
def test_counts_do_not_depend_on_the_chunks_they_are_made_in(
    name: PackingName, separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(3, documents=200, longest=40, masked=True)
    whole = pack(tokens, 16, name, separate=separate).trained_counts
    monkeypatch.setattr("shardwright.train.data.samples.packing._CHUNK", 7)
    assert pack(tokens, 16, name, separate=separate).trained_counts.tolist() == whole.tolist()


# ------------------------------------------------------------------------------
# Documents in a sample


@pytest.mark.parametrize(("name", "separate"), [entry for entry in PACKINGS if entry[1]])
@settings(max_examples=60, deadline=None)
@given(tokens=documents(), seq_len=st.integers(1, 12))
def test_targets_positions_and_numbers_stay_within_a_document(
    name: PackingName, separate: bool, tokens: Tokens, seq_len: int
) -> None:
    packing = pack(tokens, seq_len, name, separate=separate)
    batch = batch_of(tokens, packing)
    assert batch.documents is not None and batch.positions is not None
    document_of = np.searchsorted(tokens.ends, np.arange(len(tokens.ids)), side="right")
    columns = (batch.inputs, batch.targets, batch.documents, batch.positions)
    for row in range(len(packing)):
        inputs, targets, numbers, positions = (column[row].tolist() for column in columns)
        assert numbers[0] == positions[0] == 0
        for place, (token, target) in enumerate(zip(inputs, targets, strict=True)):
            assert target == IGNORED or (
                target == token + 1 and document_of[target - 1] == document_of[token - 1]
            )
            if place == 0:
                continue
            previous = inputs[place - 1]
            both_padding = not token and not previous
            same = both_padding or bool(
                token
                and previous
                and token == previous + 1
                and document_of[token - 1] == document_of[previous - 1]
            )
            # Two pieces of one document may be in one sample, one behind the other; they do not see each other.
            cut = name == "best_fit" and same and not both_padding and numbers[place] != numbers[place - 1]
            assert numbers[place] - numbers[place - 1] == (0 if same and not cut else 1)
            assert positions[place] == (positions[place - 1] + 1 if same and not cut else 0)


def test_an_end_token_is_a_target_and_the_next_first_token_is_not() -> None:
    end = 9
    tokens = Tokens(np.array([1, 2, end, 3, 4, end], np.uint8), np.array([3, 6]), None, "")
    separate = batch_of(tokens, split(tokens, 5, separate=True))
    assert separate.inputs.tolist() == [[1, 2, end, 3, 4]]
    assert separate.targets.tolist() == [[2, end, IGNORED, 4, end]]
    assert separate.documents is not None and separate.documents.tolist() == [[0, 0, 0, 1, 1]]
    assert separate.positions is not None and separate.positions.tolist() == [[0, 1, 2, 0, 1]]
    packed = batch_of(tokens, best_fit(tokens, 5))  # an end token is no input there: it has no target
    assert packed.inputs.tolist() == [[1, 2, 3, 4, 0]]
    assert packed.targets.tolist() == [[2, end, 4, end, IGNORED]]
    assert packed.documents is not None and packed.documents.tolist() == [[0, 0, 1, 1, 2]]
    one_text = batch_of(tokens, split(tokens, 5, separate=False), separate=False)
    assert one_text.targets.tolist() == [[2, end, 3, 4, end]]
    assert one_text.documents is None and one_text.positions is None


def test_a_long_document_is_cut_into_pieces_that_overlap_by_one_token() -> None:
    batch = batch_of(tokens := tokens_of([11]), best_fit(tokens, 4))
    assert batch.inputs.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert batch.targets.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11, IGNORED, IGNORED]]


def test_dtypes_and_memory_layout() -> None:
    tokens = random_tokens(1, documents=20, longest=9)
    batch = batch_of(tokens, best_fit(tokens, 8))
    assert batch.documents is not None and batch.positions is not None
    assert batch.inputs.dtype == batch.targets.dtype == batch.positions.dtype == torch.int64
    assert batch.documents.dtype == torch.int32
    assert all(t.is_contiguous() for t in (batch.inputs, batch.targets, batch.documents, batch.positions))


# ------------------------------------------------------------------------------
# Best fit


@settings(max_examples=200, deadline=None)
@given(tokens=documents(), seq_len=st.integers(1, 12))
def test_best_fit_is_best_fit_decreasing(tokens: Tokens, seq_len: int) -> None:
    packing = best_fit(tokens, seq_len)
    filled = np.bincount(np.repeat(np.arange(len(packing)), np.diff(packing.bounds)), packing.lengths)
    expected = reference(tokens, seq_len)
    assert Counter((seq_len - filled).astype(int).tolist()) == (expected[-1] if expected else Counter())


def test_best_fit_fills_samples_of_real_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 20_000).astype(np.int64) + 1
    packing = best_fit(tokens_of(lengths.tolist()), 2048)
    assert packing.padding < 0.001 * len(packing) * 2048


def test_best_fit_does_not_change_between_versions() -> None:
    # A run saved today must continue with the same samples tomorrow: these numbers are part of the format.
    packing = best_fit(tokens_of([5, 9, 3, 3, 22, 1, 4, 8]), 8)
    assert packing.bounds.tolist() == [0, 1, 2, 3, 4, 6, 9]
    assert packing.starts.tolist() == [5, 20, 28, 47, 36, 43, 0, 14, 17]
    assert packing.lengths.tolist() == [8, 8, 8, 7, 5, 3, 4, 2, 2]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_trained_tokens_are_counted_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_tokens(3, documents=200, longest=30, masked=True)
    whole = [pack(tokens, 16, name, separate=True).trained_counts.tolist() for name in ("best_fit", "none")]
    monkeypatch.setattr(packing_module, "_CHUNK", chunk)
    assert whole == [
        pack(tokens, 16, name, separate=True).trained_counts.tolist() for name in ("best_fit", "none")
    ]


def test_trained_tokens_are_counted_in_bounded_memory() -> None:
    tokens = tokens_of([1000] * 8000, [1] * 8_000_000)
    tracemalloc.start()
    best_fit(tokens, 4096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000 * 4  # 8 bytes per flag would be 64 MB


def test_no_documents_make_no_samples() -> None:
    for lengths in ([], [0], [1, 1, 0]):
        tokens = tokens_of(lengths)
        assert len(best_fit(tokens, 4)) == len(pack(tokens, 4, "none", separate=True)) == 0
        assert len(split(tokens_of([]), 4, separate=True)) == 0
    assert assign(np.array([], np.int64), 4)[1] == 0
