"""The items of a source of data: documents, conversations, or prompts with completions, in order.

    for document in documents(DataFiles(("books/*.jsonl",))):
        ...

A file is read span by span, so that several processes can read one file and no process holds a whole one. ``lines``,
``columns`` and ``numbers`` read spans of each kind of file. Nothing here makes tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.train.data.sources import lines
from shardwright.train.data.sources.items import (
    Completion,
    Conversation,
    DataFiles,
    Document,
    FilePart,
    Ids,
    Item,
)
from shardwright.train.data.sources.places import DataFile, locate
from shardwright.train.errors import UserError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "Completion",
    "Conversation",
    "DataFiles",
    "Document",
    "FilePart",
    "Ids",
    "Item",
    "documents",
    "places",
    "read",
    "spans",
]

#: Files that hold rows with keys. Only these can hold conversations and completions.
_ROWS = (".jsonl", ".parquet", ".arrow")


def documents(source: DataFiles) -> Iterator[Item]:
    """Everything that a source holds, in the order of its files and of their lines or rows.

    A document longer than about 160,000 characters comes in parts: see :class:`Document`. A file of tokens comes as
    :class:`Ids`.

    Raises:
        UserError: a file is missing, damaged, or without the key or column it should have. The message names the
        file, the line or row, and the fix.
    """
    for place in places(source):
        for span in spans(place, source):
            yield from read(span, source)


def places(source: DataFiles) -> list[DataFile]:
    """Return the files of a source, in order. Raises UserError where one is missing, or cannot hold what is asked
    for."""
    result = [place for path in source.paths for place in locate(path, source.key)]
    if source.kind != "documents":
        wrong = next((place for place in result if place.kind not in _ROWS), None)
        if wrong is not None:
            raise UserError(
                f"{source.key}: expected {', '.join(_ROWS)} files, which can hold {source.kind}, found {wrong}; "
                'set data.kind = "documents" for text and tokens'
            )
    return result


def spans(place: DataFile, source: DataFiles) -> Iterator[FilePart]:
    """Yield the parts of a file, in order. Where they begin does not depend on who reads them."""
    yield from _reader(place).spans(place, source)


def read(span: FilePart, source: DataFiles) -> Iterator[Item]:
    """Items that begin in a span, in order."""
    yield from _reader(span.place).read(span, source)


def _reader(place: DataFile) -> ModuleType:
    """Return the module that reads this kind of file. It has ``spans(place, source)`` and ``read(span, source)``."""
    if place.kind in (".parquet", ".arrow"):
        from shardwright.train.data.sources import columns

        return columns
    if place.kind == ".npy":
        from shardwright.train.data.sources import numbers

        return numbers
    return lines
