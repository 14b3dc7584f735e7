"""Lines about a run's data before step 1, so that a person sees a wrong mask or a wrong key at once.

Text alone is made here; `samples/stream.py` raises the errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from shardwright.train.data.samples.batch import IGNORED
from shardwright.train.data.samples.stream import Source, Stream
from shardwright.train.data.tokens.tokenizers import Bytes, Tokenizer
from shardwright.train.errors import counted

Decode = Callable[[Sequence[int]], str]

HEAD, TAIL = 70, 20
"""Characters of a run of tokens that are shown, of its start and its end."""
RUNS = 8
"""Runs of tokens of the first sample that are shown."""


class SourceFigures(NamedTuple):
    """Sums over the samples of a source, or of several."""

    documents: int
    tokens: int
    trained: int
    samples: int
    padding: int
    truncated: int


def figures_of(source: Source) -> SourceFigures:
    """One epoch of a source. `tokens` are those of the documents, `trained` those that samples hold as targets."""
    parts = source.parts
    return SourceFigures(
        documents=sum(len(part.tokens.ends) for part in parts),
        tokens=sum(len(part.tokens.ids) for part in parts),
        trained=source.trained,
        samples=source.samples,
        padding=sum(part.packing.padding for part in parts),
        truncated=sum(part.packing.truncated for part in parts),
    )


def tokens_of(stream: Stream | None) -> int:
    """Return the tokens of all documents of a stream's sources."""
    return 0 if stream is None else sum(figures_of(source).tokens for source in stream.sources)


def ends_in_words(tokenizer: Tokenizer, kinds: Collection[str]) -> str:
    """Return the token at the end of documents and completions, in words. Empty for bytes, which have no such token,
    and for conversations alone, which end as the chat template ends them.

    Args:
        tokenizer: of all sources.
        kinds: of the sources: documents, conversations, completions.
    """
    if isinstance(tokenizer, Bytes) or set(kinds) == {"conversations"}:
        return ""
    subject = "documents" if "documents" in kinds else "completions"
    if tokenizer.end is None:
        return f"{subject} end without a token: the tokenizer has no eos_token"
    return f"{subject} end with {escaped(tokenizer.decode([tokenizer.end]))}, id {tokenizer.end}"


def statement(
    stream: Stream,
    validation: Stream | None,
    decode: Decode,
    *,
    packing: str,
    first: int,
    samples: int,
    ends: str = "",
    spelled: int = 0,
    special_tokens: str = "text",
) -> str:
    """Return lines that describe the data of a run over `samples` samples in all, of which it has done `first`. `ends`
    is the text of :func:`ends_in_words`. `spelled`: places of the texts that spell a special token; `special_tokens`:
    the setting for them."""
    lines = [
        f"data: samples of {stream.seq_len:,} tokens, packing {packing}: {_view(stream, packing)}",
        *_indented(_table(stream, validation, samples)),
        *_indented(iter([ends] if ends else [])),
        *_indented(_spelled(spelled, special_tokens)),
        *_indented(_sample_lines(stream, first, decode)),
    ]
    return "\n".join(lines)


def _spelled(number: int, special_tokens: str) -> Iterator[str]:
    if number:
        places, verb = counted(number, "place"), "spells" if number == 1 else "spell"
        outcome = "stays text" if special_tokens == "text" else "becomes the token"
        yield f"{places} of the texts {verb} a special token, which {outcome} (data.special_tokens)"


def _view(stream: Stream, packing: str) -> str:
    if packing == "none":
        return "one document in each"
    return (
        "a token sees its own document alone"
        if stream.separate
        else "a token sees all text before it in the sample"
    )


def _table(stream: Stream, validation: Stream | None, samples: int) -> Iterator[str]:
    header = [
        "source",
        "documents",
        "tokens",
        "trained",
        "samples",
        "padding",
        "truncated",
        "share",
        "epochs",
    ]
    rows = [header]
    shares = stream.shares()
    for source, epochs, part in zip(stream.sources, stream.epochs(samples), shares, strict=True):
        share = f"{100 * part:.3g}%"
        rows.append(
            [shortened_name(source.name), *_cells(figures_of(source), stream.seq_len), share, f"{epochs:.2f}"]
        )
    if validation is not None:
        for source in validation.sources:
            rows.append(
                [source.label or source.name, *_cells(figures_of(source), validation.seq_len), "", ""]
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *numbers]).rstrip()


def _cells(figures: SourceFigures, seq_len: int) -> list[str]:
    padding = 100 * figures.padding / (figures.samples * seq_len)
    return [
        *(f"{number:,}" for number in figures[:4]),
        f"{padding:.3g}%",
        f"{figures.truncated:,}",
    ]


def _sample_lines(stream: Stream, index: int, decode: Decode) -> Iterator[str]:
    """Sample `index` of the run in words: each document's runs of trained tokens and of others."""
    place = stream.place(index)
    source = stream.sources[place.source]
    part = source.parts[place.part]
    pieces = part.packing.pieces(np.array([place.sample]))
    targets = stream.batch(index, 1).targets[0].numpy()
    trained, filled = int((targets != IGNORED).sum()), int(pieces.inputs.sum())
    of = f", of {shortened_name(source.name)}" if len(stream.sources) > 1 else ""
    yield (
        f"sample {index + 1}{of}: {counted(len(pieces.starts), 'piece of a document', 'pieces of documents')}, "
        f"{counted(trained, 'trained token')}, {filled - trained:,} not trained, {stream.seq_len - filled:,} of padding"
        if stream.separate or stream.seq_len - filled
        else f"sample {index + 1}{of}: {counted(trained, 'trained token')}, {filled - trained:,} not trained"
    )
    runs: list[tuple[str, str, list[int]]] = []
    column = 0
    for start, inputs, count in zip(*(c.tolist() for c in pieces[1:]), strict=True):
        ids = np.asarray(part.tokens.ids[start : start + count + 1]).tolist()
        flags = (targets[column : column + count] != IGNORED).tolist()
        column += inputs
        mark = ">"
        # The first token is context alone; it is shown with the token that it predicts.
        for flag, group in groupby(zip([any(flags[:1]), *flags], ids, strict=True), key=itemgetter(0)):
            runs.append((mark, "trained" if flag else "not trained", [token for _, token in group]))
            mark = " "
    for mark, label, tokens in runs[:RUNS]:
        yield f"{mark} {label:11} {_shortened(decode(tokens))}"
    if len(runs) > RUNS:
        yield f"  and {len(runs) - RUNS:,} more"


def _shortened(text: str) -> str:
    """Return a text on one line: control characters as escapes, the middle left out where it is long."""
    if len(text) > HEAD + TAIL:
        text = f"{escaped(text[:HEAD])} ... {escaped(text[-TAIL:])}"
        return text
    return escaped(text)


def escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shortened_name(name: str, limit: int = 40) -> str:
    """Paths for a table: without the current folder, which a resumed run has stored, and without a long beginning."""
    here = f"{os.getcwd()}{os.sep}"
    name = ", ".join(each.removeprefix(here) for each in name.split(", "))
    return name if len(name) <= limit else "..." + name[3 - limit :]


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
