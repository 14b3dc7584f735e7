"""Text files and the lines of .jsonl files, span by span.

A span is about a MB of a file, and a process reads it without reading what is before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import BinaryIO

from shardwright.train.data.sources.items import (
    CONTEXT,
    SPAN,
    DataFiles,
    Document,
    FilePart,
    Item,
    Origin,
    cut,
    items_of,
    parts,
)
from shardwright.train.data.sources.places import PYDOC, DataFile, open_place, readable, size_of
from shardwright.train.errors import UserError

LONGEST_LINE = 1 << 28  #: bytes; a longer line is an error, so that memory stays bounded


def spans(place: DataFile, source: DataFiles) -> Iterator[FilePart]:
    if place.kind == PYDOC:
        yield FilePart(place, 0, 1, 500_000)
        return
    size = size_of(place)
    for start in range(0, size, SPAN):
        stop = min(start + SPAN, size)
        yield FilePart(place, start, stop, stop - start)


def read(span: FilePart, source: DataFiles) -> Iterator[Item]:
    if span.place.kind == PYDOC:
        yield from _pydoc()
        return
    with open_place(span.place) as stream:
        rows = _text(span, stream) if span.place.kind == ".txt" else _rows(span, source, stream)
        with readable(span.place, OSError):
            yield from rows


def _pydoc() -> Iterator[Item]:
    from pydoc_data.topics import topics  # type: ignore[import-untyped]  # 0.5 MB of text: only when asked for

    yield from map(Document, topics.values())


# -- .txt: one document ------------------------------------------------------------------------------------------------


def _text(span: FilePart, stream: BinaryIO) -> Iterator[Item]:
    size = stream.seek(0, os.SEEK_END)
    start, stop = _boundary(span.start, size, stream), _boundary(span.stop, size, stream)
    if start == stop:
        return
    before = _bytes(stream, max(0, start - CONTEXT), start)
    after = _bytes(stream, stop, min(stop + CONTEXT, size))
    yield from parts(
        _decoded(_bytes(stream, start, stop), span.place, start),
        # Both may begin or end inside a character. They are only looked at, never learnt.
        before=before.decode("utf-8", "ignore"),
        after=after.decode("utf-8", "ignore"),
        first=start == 0,
        last=stop == size,
    )


def _boundary(offset: int, size: int, stream: BinaryIO) -> int:
    """Return the first offset from ``offset`` where the text may be cut: the same for the spans on both its sides."""
    if offset in (0, size):
        return offset
    window = _bytes(stream, offset - 1, min(offset + SPAN // 16, size))
    position = cut(window)
    if position is None:  # neither lines nor words: at a character
        position = next((each for each in range(1, len(window)) if window[each] & 0xC0 != 0x80), 1)
    return offset - 1 + position


def _bytes(stream: BinaryIO, start: int, stop: int) -> bytes:
    stream.seek(start)
    return stream.read(stop - start)


#: By the first bytes of a file that is no text: what it is, and what to do.
_FORMS = {
    b"\x1f\x8b": ("gzip's bytes", "unpack the file first (gunzip)"),
    b"\x28\xb5\x2f\xfd": ("zstd's bytes", "unpack the file first (unzstd)"),
    b"\xfd7zXZ": ("the bytes of xz", "unpack the file first (unxz)"),
    b"\xff\xfe": ("UTF-16", "convert the file to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    b"\xfe\xff": ("UTF-16", "convert the file to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
}


def _decoded(content: bytes, place: DataFile, offset: int, where: object = None) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        if not offset and (
            form := next((form for start, form in _FORMS.items() if content.startswith(start)), None)
        ):
            raise UserError(
                f"{place.key}: expected UTF-8 text, found {form[0]} in {place}; {form[1]}"
            ) from None
        raise UserError(
            f"{place.key}: expected UTF-8 text, found byte 0x{content[error.start]:02x} at offset "
            f"{offset + error.start} of {place}{f', in {where}' if where else ''}; convert the file to UTF-8 "
            "(iconv -t UTF-8)"
        ) from None


# -- .jsonl: a document per line ---------------------------------------------------------------------------------------


def _rows(span: FilePart, source: DataFiles, stream: BinaryIO) -> Iterator[Item]:
    """Yield the rows whose lines begin in the span."""
    position = span.start
    if position:
        stream.seek(position - 1)
        skipped = stream.readline(span.stop - position + 1)
        if not skipped.endswith(b"\n"):
            return
        position += len(skipped) - 1
    while position < span.stop:
        line = stream.readline(LONGEST_LINE + 1)
        origin = Origin(span.place, "line", position)
        if len(line) > LONGEST_LINE:
            raise UserError(
                f"{span.place.key}: expected a JSON object per line, found more than {LONGEST_LINE:,} bytes without "
                f"a line feed in {origin}; write one document per line"
            )
        # Only "\n" ends a line of JSON: str.splitlines would also cut at characters a string may hold.
        if not line or line.strip():
            yield from items_of(_parsed(line, origin), source, origin)
        position += len(line) or 1


def _parsed(line: bytes, origin: Origin) -> dict[str, object]:
    key = origin.place.key
    text = _decoded(line, origin.place, origin.number, origin)
    if text.startswith("\ufeff"):
        raise UserError(
            f"{key}: expected JSON, found a byte order mark at the start of {origin}; save the file as UTF-8 without it"
        )
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{key}: expected JSON, found an error at column {error.colno} of {origin} ({error.msg}){_remedy(text)}"
        ) from None
    except (ValueError, RecursionError):  # beyond what Python reads
        raise UserError(
            f"{key}: expected JSON, found nesting that is too deep or a number that is too long in {origin}; "
            "shorten it"
        ) from None
    if not isinstance(row, dict):
        raise UserError(
            f"{key}: expected a JSON object per line, found {type(row).__name__} in {origin}; write an object such as "
            '{"text": "..."}'
        )
    return row


def _remedy(text: str) -> str:
    if "\0" in text:
        return "; the line has NUL bytes, as after a crash: copy the file again, or remove the line"
    if text.strip() in ("[", "{") or text.startswith("["):
        return "; the file seems to hold one JSON value over many lines: write one object per line"
    if not text.endswith("}") and not text.endswith("\n"):
        return "; the line seems to be cut off: copy the file again"
    return "; mend the line"
