"""The tokens of a data set as files that are mapped into memory: ids, the ends of documents, and what is learnt.

A folder has ``ids.bin``, ``ends.bin``, ``trained.bin`` where only some tokens are learnt, and ``tokens.json``, which
knows their lengths and digests. Nothing here makes tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.checkpoint.digests import Damaged, digest_of, read_regular, sealed, size_of, unsealed

FACTS, IDS, ENDS, TRAINED = "tokens.json", "ids.bin", "ends.bin", "trained.bin"
SMALL = 1 << 26  #: bytes; of larger files only the length is compared when they are opened


@dataclass(frozen=True)
class Facts:
    """What ``tokens.json`` says of the other files."""

    dtype: str  #: of the ids: uint8, uint16 or uint32
    tokens: int
    documents: int
    trained: int  #: tokens that are learnt; all of them where there is no ``trained.bin``
    untrained_documents: int  #: documents without a token that is learnt
    masked: bool  #: whether there is a ``trained.bin``
    fingerprint: str
    digests: Mapping[str, str]  #: SHA-256 of each file

    def lengths(self) -> dict[str, int]:
        """Bytes of each file."""
        lengths = {IDS: self.tokens * np.dtype(self.dtype).itemsize, ENDS: self.documents * 8}
        return {**lengths, TRAINED: self.tokens} if self.masked else lengths


@dataclass(frozen=True, eq=False)
class Tokens:
    """A data set, read-only.

    ids: uint8, uint16 or uint32, one dimension.
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

    @property
    def documents(self) -> int:
        return len(self.ends)


def dtype_of(vocab_size: int) -> np.dtype:
    """The smallest dtype that holds every id."""
    return next(
        np.dtype(name) for name in ("uint8", "uint16", "uint32") if vocab_size - 1 <= np.iinfo(name).max
    )


def write_facts(folder: Path, facts: Facts) -> None:
    (folder / FACTS).write_text(sealed(asdict(facts)), encoding="utf-8")


def open_tokens(folder: Path) -> Tokens:
    """The tokens in a folder, mapped into memory.

    Lengths of all files are compared with those that were written, and digests of the small ones.

    Raises:
        Damaged: a file is missing, or differs from what was written.
    """
    facts = _facts(unsealed(read_regular(folder / FACTS), FACTS))
    for name, nbytes in facts.lengths().items():
        if (size := size_of(folder / name)) != nbytes:
            raise Damaged(f"{name} holds {size:,} bytes, {nbytes:,} expected")
        if nbytes <= SMALL and digest_of(folder / name).sha256 != facts.digests.get(name):
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
    )


def _facts(content: Mapping[str, Any]) -> Facts:
    names = {each.name for each in fields(Facts)}
    if content.keys() != names:
        raise Damaged(f"{FACTS} has other keys than expected")
    facts = Facts(**content)
    numbers = (facts.tokens, facts.documents, facts.trained, facts.untrained_documents)
    if facts.dtype not in ("uint8", "uint16", "uint32") or not all(type(each) is int for each in numbers):
        raise Damaged(f"{FACTS} has other values than expected")
    if facts.tokens < 1 or facts.documents < 1:
        raise Damaged(f"{FACTS} speaks of no tokens")
    return facts
