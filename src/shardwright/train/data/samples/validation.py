"""The part of a data set that no step trains on, and other contiguous parts: pure functions of `Tokens`."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.train.data.tokens.tokens import Row, Tokens


def part_of(tokens: Tokens, start: int, stop: int) -> Tokens:
    """Tokens `start` to `stop - 1` without a copy of ids. A document that is cut stays one in both parts."""
    first, last = np.searchsorted(tokens.ends, [start, stop], side="right")
    ends = tokens.ends[first:last] - start if start else tokens.ends[:last]
    if stop > start and (not len(ends) or ends[-1] < stop - start):
        ends = np.append(ends, stop - start)
    trained = None if tokens.trained is None else _between(tokens.trained, start, stop)
    return Tokens(_between(tokens.ids, start, stop), ends, trained, f"{tokens.fingerprint}[{start}:{stop}]")


def _between(row: Any, start: int, stop: int) -> Any:
    return row.between(start, stop) if isinstance(row, Row) else row[start:stop]


def training_and_validation(tokens: Tokens, fraction: float) -> tuple[Tokens, Tokens]:
    """Cut off the last `fraction` of the tokens for validation. The two parts share no token.

    They share no document either: the document in which the cut falls goes to validation, which has less than twice
    `fraction` then. A document longer than the validation part, or the first one, is cut itself, as one text must be.
    """
    cut = _cut_of(tokens, fraction)
    return part_of(tokens, 0, cut), part_of(tokens, cut, len(tokens.ids))


def cuts_document(tokens: Tokens, fraction: float) -> bool:
    """Return whether :func:`training_and_validation` cuts a document in two."""
    cut = _cut_of(tokens, fraction)
    return cut < len(tokens.ids) and cut not in (0, *tokens.ends[np.searchsorted(tokens.ends, cut) :][:1])


def _cut_of(tokens: Tokens, fraction: float) -> int:
    """Return the first token of validation."""
    total = len(tokens.ids)
    wanted = int(total * fraction)
    cut = total - wanted
    if wanted:
        document = int(np.searchsorted(tokens.ends, cut, side="right"))
        begin = int(tokens.ends[document - 1]) if document else 0
        if begin > 0 and int(tokens.ends[document]) - begin <= wanted:
            cut = begin
    return cut
