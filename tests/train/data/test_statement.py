"""The words of a run about its data: figures that add up, and a mask that a person can check."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.train.data.samples.packing import PackingName
from shardwright.train.data.samples.stream import Stream
from shardwright.train.data.statement import ends_in_words, figures_of, statement
from shardwright.train.data.tokens.tokenizers import Bytes, open_tokenizer
from shardwright.train.data.tokens.tokens import Tokens
from tests.train.kit.tokens import random_tokens, source_of, tokens_of

CHAT = [
    ("<user>What is the capital\nof France?<end><model>", 0),
    ("Paris.<end>", 1),
    ("<user>Thanks<end>", 0),
]


def bytes_of(*documents: list[tuple[str, int]]) -> Tokens:
    """Documents of runs of (text, trained), a byte a token."""
    text = [[(byte, flag) for part, flag in runs for byte in part.encode()] for runs in documents]
    flat = np.array([pair for document in text for pair in document], np.uint8)
    return Tokens(flat[:, 0], np.cumsum([len(document) for document in text]), flat[:, 1], "")


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode()


def lines_of(
    tokens: Tokens, seq_len: int, packing: PackingName, *, separate: bool = True, **options: int
) -> list[str]:
    stream = Stream(
        [source_of(tokens, seq_len, packing, separate=separate, name="a.jsonl")], [1], 0, separate=separate
    )
    arguments = {"first": 0, "samples": 10, **options}
    return statement(stream, None, decode, packing=packing, **arguments).split("\n")


def test_a_conversation_is_shown_with_its_mask() -> None:
    lines = lines_of(bytes_of(CHAT, [("Hi", 0), ("Hello<end>", 1)]), 128, "best_fit")
    assert lines[-6:] == [
        "  sample 1: 2 pieces of documents, 21 trained tokens, 65 not trained, 42 of padding",
        r"  > not trained <user>What is the capital\nof France?<end><model>",
        "    trained     Paris.<end>",
        "    not trained <user>Thanks<end>",
        "  > not trained Hi",
        "    trained     Hello<end>",
    ]


def test_long_runs_are_shortened_and_many_are_counted() -> None:
    many = [("abc" * 50, 0), *[("yes", 1), ("no", 0)] * 10]
    lines = lines_of(bytes_of(many), 512, "none")
    text = "abc" * 50
    assert f"  > not trained {text[:70]} ... {text[-20:]}" in lines
    assert lines[-1] == "    and 13 more"


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert r"  > trained     a\x1b[2Jb\tc" in lines_of(bytes_of([("a\x1b[2Jb\tc", 1)]), 8, "none")


def test_figures_add_up() -> None:
    for packing, separate in (("split", True), ("split", False), ("best_fit", True), ("none", True)):
        tokens = random_tokens(3, documents=80, longest=60)
        source = source_of(tokens, 32, packing, separate=separate)  # type: ignore[arg-type]
        figures = figures_of(source)
        assert (figures.documents, figures.tokens) == (80, len(tokens.ids))
        inputs = figures.samples * 32 - figures.padding
        if packing == "split":
            assert inputs + figures.truncated == figures.tokens - 1
            assert figures.trained <= inputs and (separate or figures.trained == inputs)
        else:
            firsts = int((np.diff(tokens.ends, prepend=0) > 0).sum())
            assert inputs == figures.trained == figures.tokens - firsts - figures.truncated


def test_the_table_shows_every_source_and_its_epochs() -> None:
    sources = [
        source_of(tokens_of([17] * 10), 16, "best_fit", separate=True, name="long/" * 20 + "a.jsonl"),
        source_of(tokens_of([9] * 1000), 16, "best_fit", separate=True, name=os.path.abspath("b.jsonl")),
    ]
    stream = Stream(sources, [3, 1], 0, separate=True)
    rest = source_of(tokens_of([20]), 16, "split", separate=True, name="b.jsonl")
    held = Stream([replace(rest, label="validation")], [1], 0, separate=True)
    text = statement(stream, held, lambda ids: "", packing="best_fit", first=0, samples=4096)
    _, header, first, second, validation, *_ = text.split("\n")
    assert [" ".join(line.split()) for line in (header, first, second, validation)] == [
        "source documents tokens trained samples padding truncated share epochs",
        "...long/long/long/long/long/long/a.jsonl 10 170 160 10 0% 0 75% 307.20",
        "b.jsonl 1,000 9,000 8,000 500 0% 0 25% 2.05",
        "validation 1 20 16 1 0% 3",
    ]
    assert len(header) == len(first) == len(second)


def test_the_sample_shown_is_the_next_one_of_the_run() -> None:
    names = ["a" * number for number in range(2, 10)]
    tokens = bytes_of(*[[(name, 0), (f"after {name}", 1)] for name in names])
    shown = {tuple(lines_of(tokens, 32, "none", first=index)[-2:]) for index in range(8)}
    assert shown == {(f"  > not trained {name}", f"    trained     after {name}") for name in names}


def test_one_text_is_one_run_of_trained_tokens() -> None:
    tokens = Tokens(np.frombuffer(b"To be, or not to be, that is", np.uint8), np.array([28]), None, "")
    lines = lines_of(tokens, 13, "split", separate=False, first=0)
    assert (
        lines[0] == "data: samples of 13 tokens, packing split: a token sees all text before it in the sample"
    )
    assert lines[-2] == "  sample 1: 13 trained tokens, 0 not trained"
    assert lines[-1] in ("  > trained     To be, or not ", "  > trained      to be, that is")


@pytest.mark.parametrize("separate", [True, False])
def test_a_target_across_documents_is_shown_as_the_batch_has_it(separate: bool) -> None:
    tokens = bytes_of([("one.", 1)], [("two.", 1)])
    lines = lines_of(tokens, 7, "split", separate=separate)
    shown = ["  > trained     one.", "  > trained     two."] if separate else ["  > trained     one.two."]
    assert lines[-len(shown) :] == shown


def test_the_token_at_the_end_of_documents_is_named(tmp_path: Path) -> None:
    from tests.train.data.samples import save_tokenizer  # skips the test if the package tokenizers is missing

    tokenizer = open_tokenizer(str(save_tokenizer(tmp_path, eos_token="<|im_end|>")))
    assert tokenizer.end is not None and tokenizer.encode("<|im_end|>") == [tokenizer.end]
    ends = ends_in_words(tokenizer, ["conversations", "documents"])
    assert ends == f"documents end with <|im_end|>, id {tokenizer.end}"
    assert ends_in_words(tokenizer, ["completions"]).startswith("completions end with <|im_end|>")
    assert ends_in_words(tokenizer, ["conversations"]) == ends_in_words(Bytes(), ["documents"]) == ""
    stream = Stream([source_of(tokens_of([20]), 16, "split", separate=True)], [1], 0, separate=True)
    options = {"packing": "split", "first": 0, "samples": 1}
    lines = statement(stream, None, lambda ids: "", **options, ends=ends).split("\n")  # type: ignore[arg-type]
    assert lines[3] == f"  {ends}" and lines[4].startswith("  sample 1")
    assert len(statement(stream, None, lambda ids: "", **options).split("\n")) == len(lines) - 1  # type: ignore[arg-type]
