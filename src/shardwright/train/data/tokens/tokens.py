"""The tokens of a data set as files that are mapped into memory: ids, the ends of documents, and what is learnt.

A folder has ``ids.bin``, ``ends.bin``, ``trained.bin`` where only some tokens are learnt, and ``tokens.json``, which
knows their lengths and digests. Nothing here makes tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwright.checkpoint import Damaged
from shardwright.common.regular_files import read_regular, size_of
from shardwright.common.sealed_json import sealed, unsealed

FACTS, IDS, ENDS, TRAINED = "tokens.json", "ids.bin", "ends.bin", "trained.bin"
SMALL = 1 << 26  #: bytes; of larger files only the length is compared when they are opened


class FileFacts(NamedTuple):
    """The documents that one file of a source gave. Files follow each other in the order of the source."""

    documents: int
    tokens: (
        int  #: from its first token to the end of its last document, without what stands before the next file
    )
    joint: int  #: tokens between two documents of the file, which belong to the one before
    digest: str  #: see `FileDigest`


class FileDigest:
    """A digest of documents as they come: of ids, of ends relative to the first token, and of what is learnt."""

    def __init__(self) -> None:
        self._ids, self._ends, self._trained = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()

    def add_ids(self, content: Any) -> None:
        """Bytes, or a contiguous array of the dtype of the data set."""
        self._ids.update(content)

    def add_ends(self, ends: np.ndarray) -> None:
        self._ends.update(ends.astype("<i8").tobytes())

    def add_trained(self, content: Any) -> None:
        """Bytes, or a contiguous uint8 array."""
        self._trained.update(content)

    def hexdigest(self) -> str:
        parts = [each.hexdigest() for each in (self._ids, self._ends, self._trained)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Facts:
    """The content of ``tokens.json``, which describes the other files."""

    dtype: str  #: of the ids: uint8, uint16 or uint32
    tokens: int
    documents: int
    trained: int  #: tokens that are learnt; all of them where there is no ``trained.bin``
    untrained_documents: int  #: documents without a token that is learnt
    spelled: int  #: places where a text spells a special token
    masked: bool  #: whether there is a ``trained.bin``
    fingerprint: str
    digests: Mapping[str, str]  #: SHA-256 of each file
    files: tuple[FileFacts, ...]  #: one for each file of the source

    def lengths(self) -> dict[str, int]:
        """Return the bytes of each file."""
        lengths = {IDS: self.tokens * np.dtype(self.dtype).itemsize, ENDS: self.documents * 8}
        return {**lengths, TRAINED: self.tokens} if self.masked else lengths


class Row:
    """Stretches of an array of one dimension, end to end, without a copy. A slice of it is an array.

    `stretches`: start and stop of each, none empty.
    """

    def __init__(self, array: np.ndarray, stretches: Sequence[tuple[int, int]]) -> None:
        self.dtype = array.dtype
        self._array, self._stretches = array, tuple(stretches)
        self._bounds = np.cumsum([0, *(stop - start for start, stop in stretches)])

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, key: Any) -> np.ndarray:
        """Return a slice with step 1, or the elements at an array of indices."""
        if not isinstance(key, slice):
            numbers = np.searchsorted(self._bounds, key, side="right") - 1
            starts = np.array([start for start, _ in self._stretches])
            return self._array[key - self._bounds[numbers] + starts[numbers]]
        start, stop, _ = key.indices(len(self))
        number = int(np.searchsorted(self._bounds, start, side="right")) - 1
        pieces = []
        while start < stop:
            offset = self._stretches[number][0] - int(self._bounds[number])
            end = min(stop, int(self._bounds[number + 1]))
            pieces.append(self._array[start + offset : end + offset])
            start, number = end, number + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else self._array[:0]

    def between(self, start: int, stop: int) -> Row:
        """Return the elements from `start` to `stop - 1`, without a copy."""
        bounds = self._bounds.tolist()
        return Row(self._array, [
            (begin + max(start - low, 0), end - max(high - stop, 0))
            for (begin, end), low, high in zip(self._stretches, bounds, bounds[1:], strict=False)
            if max(start, low) < min(stop, high)
        ])  # fmt: skip


@dataclass(frozen=True, eq=False)
class Tokens:
    """A data set, read-only.

    ids: uint8, uint16 or uint32, one dimension. Arrays, or a `Row` of several stretches of them; so is ``trained``.
    ends: int64 [documents]; document n is ``ids[ends[n - 1]:ends[n]]``.
    trained: uint8, as long as ``ids``, 1 where the token is learnt; None: all are.
    fingerprint: a digest of all three. Equal ones mean equal tokens, whatever files they came from.
    sha256: of the bytes of ``ids``.
    """

    ids: np.ndarray
    ends: np.ndarray
    trained: np.ndarray | None
    fingerprint: str
    sha256: str = ""
    trained_tokens: int = 0
    untrained_documents: int = 0  #: for example conversations in which the assistant says nothing
    spelled: int = 0  #: places where a text spells a special token
    files: tuple[
        FileFacts, ...
    ] = ()  #: of the files of the source; empty where the tokens come from elsewhere

    @property
    def documents(self) -> int:
        return len(self.ends)


def dtype_of(vocab_size: int) -> np.dtype:
    """Return the smallest dtype that holds every id."""
    return next(
        np.dtype(name) for name in ("uint8", "uint16", "uint32") if vocab_size - 1 <= np.iinfo(name).max
    )


def write_facts(folder: Path, facts: Facts) -> None:
    (folder / FACTS).write_text(sealed(asdict(facts)), encoding="utf-8")


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def open_tokens(folder: Path) -> Tokens:
    """Return the tokens in a folder, mapped into memory.

    Lengths of all files are compared with those that were written, and digests of the small ones.

    Raises:
        Damaged: a file is missing, or differs from what was written.
    """
    facts = _facts(unsealed(read_regular(folder / FACTS), FACTS))
    for name, nbytes in facts.lengths().items():
        if (size := size_of(folder / name)) != nbytes:
            raise Damaged(f"{name} holds {size:,} bytes, {nbytes:,} expected")
        if nbytes <= SMALL and _sha256(folder / name) != facts.digests.get(name):
            raise Damaged(f"{name} is not the file that was written: its SHA-256 differs")
    ends = np.memmap(folder / ENDS, np.int64, "r")
    if ends[-1] != facts.tokens:
        raise Damaged(f"{ENDS} ends at token {ends[-1]:,} of {facts.tokens:,}")
    return Tokens(
        ids=np.memmap(folder / IDS, np.dtype(facts.dtype), "r"),
        ends=ends,
        trained=np.memmap(folder / TRAINED, np.uint8, "r") if facts.masked else None,
        fingerprint=facts.fingerprint,
        sha256=facts.digests[IDS],
        trained_tokens=facts.trained,
        untrained_documents=facts.untrained_documents,
        spelled=facts.spelled,
        files=facts.files,
    )


def _facts(content: Mapping[str, Any]) -> Facts:
    names = {each.name for each in fields(Facts)}
    if content.keys() != names:
        raise Damaged(f"{FACTS} has other keys than expected")
    try:
        facts = Facts(**content)
        facts = replace(facts, files=tuple(FileFacts(*each) for each in facts.files))
    except TypeError:
        raise Damaged(f"{FACTS} has other values than expected") from None
    numbers = (facts.tokens, facts.documents, facts.trained, facts.untrained_documents, facts.spelled)
    if facts.dtype not in ("uint8", "uint16", "uint32") or not all(type(each) is int for each in numbers):
        raise Damaged(f"{FACTS} has other values than expected")
    if sum(each.documents for each in facts.files) != facts.documents:
        raise Damaged(f"{FACTS} has other documents in all than in its files")
    if facts.tokens < 1 or facts.documents < 1:
        raise Damaged(f"{FACTS} speaks of no tokens")
    return facts
