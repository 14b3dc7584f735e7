"""The names of the files that a save writes: one of each rank, its note, and the same behind a URL.

Behind a URL nothing is renamed, so a name also has the attempt of its save: ``__0_0.ATTEMPT.distcp``.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from shardwright.checkpoint.format.names import INDEX, METADATA, VALUES, VALUES_FOR_TORCH

MARK = "__begun.save"  #: behind a URL, an object that every rank must see before it writes
_PARTS, _NOTE = "__{}_0.distcp", "rank-{}.note"
_NUMBERED = re.compile("|".join(re.escape(each).replace(r"\{\}", r"\d+") for each in (_PARTS, _NOTE)))
_ATTEMPT = re.compile(r"\.[0-9a-f]{16}(?=\.[a-z]+$)")


def file_of_rank(rank: int) -> str:
    """Return the name of a rank's file, as torch's distributed checkpoint names it."""
    return _PARTS.format(rank)


def note_of_rank(rank: int) -> str:
    """Return the name of the note that the writer process of a rank leaves for the first rank's."""
    return _NOTE.format(rank)


def files_of_save(ranks: int) -> list[str]:
    """Return the files of a save by ``ranks`` ranks, without the file for torch's reader."""
    return [*map(file_of_rank, range(ranks)), VALUES, INDEX]


def with_attempt(name: str, attempt: str | None) -> str:
    """Return the name of an object of a save. Torch's reader looks for ``.metadata`` under this name."""
    if name == METADATA:
        return name
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{attempt}{dot}{suffix}"


def is_mark(name: str) -> bool:
    """Return whether an object says that a save has begun."""
    return _ATTEMPT.sub("", name) == MARK


def is_of_checkpoint(name: str) -> bool:
    """Return whether a save may have written this file, in a folder or behind a URL."""
    plain = _ATTEMPT.sub("", name)
    return (
        plain in (INDEX, METADATA, VALUES, VALUES_FOR_TORCH, MARK) or _NUMBERED.fullmatch(plain) is not None
    )


def may_be_checkpoint(names: Collection[str]) -> bool:
    """Return whether a folder with these files may be a checkpoint: it has a file of one, or has lost all of them."""
    return not names or any(map(is_of_checkpoint, names))


def is_of_save_at_url(name: str) -> bool:
    """Return whether a save behind a URL may have written this object."""
    return name in (INDEX, METADATA) or (_ATTEMPT.search(name) is not None and is_of_checkpoint(name))
