"""Corpora, what is refused of them, and the order in which their samples come."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.train.config import DataConfig
from shardwright.train.data import Corpus, SampleOrder, decode, encode, load_corpus
from shardwright.train.data.corpus import batch
from shardwright.train.errors import UserError


def corpus_of(length: int, validation: int = 0) -> Corpus:
    """Tokens that tell their position modulo 251, so that a window can be recognised."""
    tokens = (torch.arange(length + validation) % 251).to(torch.uint8)
    return Corpus(tokens[:length], tokens[length:], sha256="")


def load(*paths: Path, **options: object) -> Corpus:
    return load_corpus(DataConfig.model_validate({"source": [str(path) for path in paths], **options}))


def text_of(corpus: Corpus) -> str:
    return decode(torch.cat([corpus.train, corpus.validation]))


# ------------------------------------------------------------------------------
# Loading


def test_default_corpus_is_english_text() -> None:
    corpus = load_corpus(DataConfig())
    assert corpus.train.dtype == corpus.validation.dtype == torch.uint8
    assert corpus.vocab_size == 256
    text = text_of(corpus)
    assert len(text) > 400_000 and "the" in text.split()
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest() == load_corpus(DataConfig()).sha256


def test_validation_is_the_last_part(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0123456789" * 10)
    corpus = load(path, validation_fraction=0.25)
    assert decode(corpus.train) == ("0123456789" * 10)[:75]
    assert decode(corpus.validation) == ("0123456789" * 10)[75:]
    everything = load(path, validation_fraction=0)
    assert len(everything.train) == 100 and len(everything.validation) == 0


def test_files_are_joined_in_the_order_given(tmp_path: Path) -> None:
    first, second, third = tmp_path / "z.txt", tmp_path / "a.jsonl", tmp_path / "m.txt"
    first.write_text("one", encoding="utf-8")
    second.write_text('{"text": "tw\u2028o", "id": 1}\n\n{"text": "drei \\u00e9"}\n', encoding="utf-8")
    third.write_text("four\n", encoding="utf-8")
    assert text_of(load(first, second, third)) == "one\ntw\u2028o\ndrei é\nfour\n"
    assert text_of(load(third, first)) == "four\none"
    assert load(first, second).sha256 != load(second, first).sha256


def test_key_of_the_documents_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"body": "hello", "text": 3}))
    assert text_of(load(path, text_key="body")) == "hello"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "data.source: expected text, found none in"),
        ("a.jsonl", b"\n\n", "data.source: expected text, found none in"),
        ("a.txt", b"caf\xe9!", "expected UTF-8 text, found byte 0xe9 at offset 3 of"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}', "expected key 'text', found none of line 2 of"),
        ("a.jsonl", b'{"text": "x"}\n["y"]', "expected key 'text', found none of line 2 of"),
        ("a.jsonl", b'{"text": 3}', "expected a string, found int in 'text' of line 1 of"),
        ("a.jsonl", b'{"text": "\\ud800"}', "half of a surrogate pair in 'text' of line 1 of"),
        (
            "a.jsonl",
            b'{"text": "x"}\n\n{"text": }',
            "expected JSON, found an error at column 10 of line 3 of",
        ),
        ("a.csv", b"x", "expected pydoc or the path of a .txt or .jsonl file"),
    ],
)
def test_files_that_cannot_be_learnt_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a file, found nothing at .*none\.txt"):
        load(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*folder\.txt"):
        load(tmp_path / "folder.txt")
    with pytest.raises(UserError, match="expected pydoc or the path"):
        load_corpus(DataConfig(source="pydocs"))


def test_text_survives_the_tokens() -> None:
    text = "Grüße, 世界 \U0001f600\x00"
    assert decode(encode(text)) == text
    assert encode(text).dtype == torch.int64


def test_tokens_that_are_no_text_decode_to_replacements() -> None:
    assert decode([104, 105, 0xFF]) == "hi\ufffd"
    assert decode([104, 105, 100_000]) == "hi\ufffd"


# ------------------------------------------------------------------------------
# The order


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


# ------------------------------------------------------------------------------
# Batches


def test_targets_are_the_inputs_moved_on_by_one() -> None:
    corpus = corpus_of(1000)
    inputs, targets = batch(corpus, seed=0, first_index=5, count=4, seq_len=32)
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert torch.equal((inputs + 1) % 251, targets)
    order = SampleOrder(corpus.windows(32), seed=0)
    assert inputs[:, 0].tolist() == [order[index] * 32 % 251 for index in range(5, 9)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_any_number_of_ranks_draws_the_same_global_batches(ranks: int) -> None:
    corpus, size = corpus_of(5000), 12
    for step in (0, 1, 40):
        whole = batch(corpus, 3, step * size, size, 16)[0]
        share = size // ranks
        parts = [batch(corpus, 3, step * size + rank * share, share, 16)[0] for rank in range(ranks)]
        assert torch.equal(torch.cat(parts), whole)


def test_an_epoch_covers_the_text_without_overlap() -> None:
    corpus = corpus_of(16 * 10 + 1)
    inputs, _ = batch(corpus, seed=0, first_index=0, count=10, seq_len=16)
    assert sorted(inputs.flatten().tolist()) == list(range(160))


def test_validation_batches_come_from_the_validation_part() -> None:
    corpus = corpus_of(100, validation=65)
    inputs, targets = batch(corpus, 0, 0, 4, 16, split="validation")
    assert sorted(inputs.flatten().tolist()) == list(range(100, 164))
    assert targets.max() == 164


def test_a_sequence_longer_than_the_corpus_is_refused() -> None:
    corpus = corpus_of(16, validation=3)
    assert batch(corpus, 0, 0, 1, seq_len=15)[0].shape == (1, 15)
    with pytest.raises(
        UserError, match=r"seq_len: expected at most 15, since the train part .* 16 tokens, found 16"
    ):
        batch(corpus, 0, 0, 1, seq_len=16)
    with pytest.raises(
        UserError, match=r"expected at most 2, since the validation part .*validation_fraction"
    ):
        batch(corpus, 0, 0, 1, seq_len=16, split="validation")
