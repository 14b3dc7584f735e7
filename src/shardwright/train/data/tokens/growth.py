"""A run's record of its data, so that it can continue after documents were appended: pure functions of tokens.

A run has parts: the documents of its start, then those of each time that its data had grown at a resume. A part takes
documents from every file, in the order of the files. So documents may be appended to any file of a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from shardwright.train.data.tokens.tokens import FileDigest, FileFacts, Row, Tokens
from shardwright.train.errors import UserError, counted

_BLOCK = 1 << 24


class Extent(NamedTuple):
    """The part of a file that is used by all parts up to one of them."""

    documents: int
    tail: int  #: tokens after the last of them that the part takes, too: what separates it from the next file


@dataclass(frozen=True)
class Known:
    """A run's record of a source."""

    identity: str
    """Identity of the tokens at the run's last start."""
    files: tuple[FileFacts, ...]
    """Files at the run's last start."""
    parts: tuple[tuple[Extent, ...], ...]
    """For each part: the documents of each file used so far. Later parts may have more files."""
    epochs: tuple[int, ...] = ()
    """The epoch of the source in which each part after the first came."""

    @property
    def documents(self) -> int:
        """Number of documents of all parts."""
        return sum(extent.documents for extent in self.parts[-1])

    def as_json(self) -> dict[str, Any]:
        return {"identity": self.identity, "files": self.files, "parts": self.parts, "epochs": self.epochs}

    @classmethod
    def from_json(cls, content: Any) -> Known:
        """Raises KeyError, TypeError or ValueError for what `as_json` did not make."""
        parts = tuple(tuple(Extent(*extent) for extent in part) for part in content["parts"])
        files = tuple(FileFacts(*each) for each in content["files"])
        known = cls(str(content["identity"]), files, parts, tuple(map(int, content["epochs"])))
        if len(known.epochs) + 1 != len(parts) or any(len(part) > len(files) for part in parts):
            raise ValueError(
                "as many epochs as parts after the first, and no part with more files than there are"
            )
        return known


def known_of(tokens: Tokens, identity: str) -> Known:
    """Return the record of a run that begins with these tokens."""
    return Known(identity, tokens.files, (_extents(tokens),))


def with_part(known: Known, tokens: Tokens, identity: str, epoch: int) -> Known:
    """Return the record after all of `tokens` was taken into a part in `epoch`."""
    return Known(identity, tokens.files, (*known.parts, _extents(tokens)), (*known.epochs, epoch))


def seen(known: Known, tokens: Tokens, identity: str) -> Known:
    """Return the record after a look at `tokens` of which no document was taken."""
    return replace(known, identity=identity, files=tokens.files)


def check_grown(known: Known, tokens: Tokens, places: Sequence[object], name: str) -> None:
    """Raise UserError unless every file has the documents that the run knows, in front of any others.

    `places`: of the files, for messages; `name`: of the source. Only files that changed are read.
    """
    if len(tokens.files) < len(known.files):
        files = counted(len(known.files), "file")
        raise UserError(
            f"--resume: expected the {files} of {name} that the run has, and new ones after them, "
            f"found {len(tokens.files):,} in all; restore the data, or start a new run"
        )
    firsts = np.cumsum([0, *(file.documents for file in tokens.files)]).tolist()
    for number, (old, new) in enumerate(zip(known.files, tokens.files, strict=False)):
        grown = old.documents < new.documents and _begins_with(tokens, firsts[number], new, old)
        if old != new and not grown:
            documents = counted(old.documents, "document")
            raise UserError(
                f"--resume: {places[number]} no longer begins with the {documents} on which the run was trained; "
                "expected these, then any appended ones, found other tokens: a document, the tokenizer or the template "
                "was changed, or a new file comes before an old one; restore it or start a new run"
            )


def appended_documents(known: Known, tokens: Tokens) -> int:
    """Documents that no part of the run has."""
    return tokens.documents - known.documents


def parts_of(known: Known, tokens: Tokens) -> list[Tokens]:
    """Return the parts of the run, and what is left as the last one. Ids are not copied."""
    nothing = (Extent(0, 0),) * len(tokens.files)
    limits = [nothing, *((*part, *nothing[len(part) :]) for part in known.parts), _extents(tokens)]
    return [_part(tokens, lower, upper) for lower, upper in pairwise(limits)]


def _extents(tokens: Tokens) -> tuple[Extent, ...]:
    """Return all documents of all files."""
    result = []
    first = 0
    for file in tokens.files:
        start, stop = _end(tokens, first), _end(tokens, first + file.documents)
        result.append(Extent(file.documents, stop - start - file.tokens))
        first += file.documents
    return tuple(result)


def _part(tokens: Tokens, lower: Sequence[Extent], upper: Sequence[Extent]) -> Tokens:
    stretches: list[tuple[int, int]] = []
    ends: list[np.ndarray] = []
    total = first = 0
    for file, (begin, _), (end, tail) in zip(tokens.files, lower, upper, strict=True):
        if begin < end:
            start, stop = _end(tokens, first + begin), _stop(tokens, first, file, end) + tail
            relative = np.array(tokens.ends[first + begin : first + end]) + (total - start)
            relative[-1] = total + stop - start
            ends.append(relative)
            total += stop - start
            if stretches and stretches[-1][1] == start:
                start = stretches.pop()[0]
            stretches.append((start, stop))
        first += file.documents
    name = f"{tokens.fingerprint}{stretches}"
    trained = None if tokens.trained is None else _row(tokens.trained, stretches)
    return Tokens(_row(tokens.ids, stretches), np.concatenate([np.zeros(0, np.int64), *ends]), trained, name)


def _row(row: np.ndarray, stretches: Sequence[tuple[int, int]]) -> Any:
    """Return an array where it can be one. Both are read by slices."""
    if len(stretches) < 2:
        start, stop = stretches[0] if stretches else (0, 0)
        return row[start:stop]
    return Row(row, stretches)


def _end(tokens: Tokens, document: int) -> int:
    """Return the end of the documents before this one."""
    return int(tokens.ends[document - 1]) if document else 0


def _stop(tokens: Tokens, first: int, file: FileFacts, documents: int) -> int:
    """Return the end of a file's first `documents`, without the separator after them."""
    if documents == file.documents:
        return _end(tokens, first) + file.tokens
    return _end(tokens, first + documents) - file.joint


def _begins_with(tokens: Tokens, first: int, file: FileFacts, old: FileFacts) -> bool:
    """Return whether the file whose first document is `first` begins with what `old` says."""
    start = _end(tokens, first)
    stop = _stop(tokens, first, file, old.documents) if old.documents else start
    if stop - start != old.tokens:
        return False
    digest = FileDigest()
    for begin in range(start, stop, _BLOCK):
        end = min(begin + _BLOCK, stop)
        digest.add_ids(np.ascontiguousarray(tokens.ids[begin:end]))
        if tokens.trained is not None:
            digest.add_trained(np.ascontiguousarray(tokens.trained[begin:end]))
    ends = np.array(tokens.ends[first : first + old.documents]) - start
    if len(ends):
        ends[-1] = old.tokens
    digest.add_ends(ends)
    return digest.hexdigest() == old.digest
