"""Rows of .parquet and .arrow files (Arrow's stream and file formats), span by span. Needs pyarrow."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from shardwright.train.data.sources.items import (
    SPAN,
    TOOLS,
    DataFiles,
    FilePart,
    Item,
    Origin,
    check_keys,
    items_of,
    needed_keys,
)
from shardwright.train.data.sources.places import DataFile, open_place, size_of
from shardwright.train.errors import UserError

ROWS = 1024  #: rows that are converted at once, at most
BATCHES = 16 * SPAN  #: bytes of the record batches of an .arrow file that one span has, about
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  #: of a stream that was closed


def spans(place: DataFile, source: DataFiles) -> Iterator[FilePart]:
    """Row groups of a .parquet file, and runs of record batches of an .arrow file."""
    if place.kind == ".parquet":
        yield from _row_groups(place, source)
    else:
        yield from _runs(place, source)


def read(span: FilePart, source: DataFiles) -> Iterator[Item]:
    names = list(needed_keys(source).values())
    with ExitStack() as stack:
        if span.place.kind == ".parquet":
            batches = _parquet_batches(span, names, source, stack)
        else:
            batches = _arrow_batches(span, stack)
        for first, batch in batches:
            with _reading(span.place):
                rows = _rows(batch, names, source, span.place, first)
            for number, row in enumerate(rows, start=first):
                yield from items_of(row, source, Origin(span.place, "row", number))


# -- parquet -----------------------------------------------------------------------------------------------------------


def _row_groups(place: DataFile, source: DataFiles) -> Iterator[FilePart]:
    size_of(place)
    with ExitStack() as stack:
        file = _parquet(place, stack)
        _check_columns(file.schema_arrow, source, place)
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            nbytes = sum(group.column(each).total_compressed_size for each in range(group.num_columns))
            yield FilePart(place, number, number + 1, nbytes)


def _parquet(place: DataFile, stack: ExitStack) -> Any:
    pyarrow = _pyarrow(place)
    parquet = importlib.import_module("pyarrow.parquet")

    with _reading(place):
        stream = stack.enter_context(
            open_place(place) if place.remote else pyarrow.memory_map(place.path, "r")
        )
        return stack.enter_context(parquet.ParquetFile(stream, pre_buffer=False))


def _parquet_batches(
    span: FilePart, names: list[str], source: DataFiles, stack: ExitStack
) -> Iterator[tuple[int, Any]]:
    file = _parquet(span.place, stack)
    first = sum(file.metadata.row_group(number).num_rows for number in range(span.start))
    group = file.metadata.row_group(span.start)
    wanted = [*names, *_tools(file.schema_arrow, source)]
    size = _rows_at_once(group.total_byte_size, group.num_rows)
    batches = file.iter_batches(batch_size=size, row_groups=[span.start], columns=wanted, use_threads=False)
    while True:
        with _reading(span.place, f"row group {span.start} of "):
            batch = next(batches, None)
        if batch is None:
            return
        yield first, batch
        first += batch.num_rows


# -- arrow -------------------------------------------------------------------------------------------------------------


def _runs(place: DataFile, source: DataFiles) -> Iterator[FilePart]:
    size = size_of(place)
    with ExitStack() as stack:
        reader, count = _arrow(place, stack)
        _check_columns(reader.schema, source, place)
        if count is None:
            _check_end(place, size)
        start, nbytes, number = 0, 0, 0
        for number, batch in enumerate(_each(reader, count, place), start=1):
            nbytes += batch.nbytes
            if nbytes >= BATCHES and not place.remote:
                yield FilePart(place, start, number, nbytes)
                start, nbytes = number, 0
        if number > start:
            yield FilePart(place, start, number, nbytes)


def _arrow(place: DataFile, stack: ExitStack) -> tuple[Any, int | None]:
    """Return a reader, and the number of batches in a file of Arrow's file format; None for its stream format."""
    pyarrow = _pyarrow(place)
    with open_place(place) as stream:
        magic = stream.read(6)
    with _reading(place):
        source = stack.enter_context(
            open_place(place) if place.remote else pyarrow.memory_map(place.path, "r")
        )
        if magic == b"ARROW1":
            reader = stack.enter_context(pyarrow.ipc.open_file(source))
            return reader, reader.num_record_batches
        return stack.enter_context(pyarrow.ipc.open_stream(source)), None


def _each(reader: Any, count: int | None, place: DataFile) -> Iterator[Any]:
    """Yield the batches. To pass over a batch of a mapped file reads only its header."""
    for number in itertools.count() if count is None else range(count):
        with _reading(place, f"record batch {number} of "):
            try:
                batch = reader.read_next_batch() if count is None else reader.get_batch(number)
            except StopIteration:
                return
        yield batch


def _arrow_batches(span: FilePart, stack: ExitStack) -> Iterator[tuple[int, Any]]:
    reader, count = _arrow(span.place, stack)
    first = 0
    for number, batch in enumerate(_each(reader, count, span.place)):
        if number >= span.stop:
            return
        if number >= span.start:
            size = _rows_at_once(batch.nbytes, batch.num_rows)
            for row in range(0, batch.num_rows, size):
                yield first + row, batch.slice(row, size)
        first += batch.num_rows


def _check_end(place: DataFile, size: int) -> None:
    with open_place(place) as stream:
        stream.seek(max(0, size - len(_END)))
        end = stream.read()
    if end != _END:
        raise UserError(
            f"{place.key}: expected an Arrow stream with its end mark, found none in {place}; the file is cut off, or "
            "its writer was not closed: write or copy it again"
        )


# -- both --------------------------------------------------------------------------------------------------------------


def _rows_at_once(nbytes: int, rows: int) -> int:
    """So many rows that they have about 4 MB."""
    return max(1, min(ROWS, 4 * SPAN * rows // max(nbytes, 1)))


def _tools(schema: Any, source: DataFiles) -> list[str]:
    return [TOOLS] if source.kind == "conversations" and TOOLS in schema.names else []


def _check_columns(schema: Any, source: DataFiles, place: DataFile) -> None:
    check_keys(dict.fromkeys(schema.names), source, place)
    pyarrow = _pyarrow(place)
    types = pyarrow.types
    for setting, name in needed_keys(source).items():
        kind = schema.field(name).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        if source.kind == "conversations":
            fits = types.is_list(kind) or types.is_large_list(kind)
            expected = "a list of messages"
        else:
            fits = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
            expected = "strings"
        if not fits:
            raise UserError(
                f"{source.section}.{setting}: expected {expected}, found {kind} in column {name!r} of {place}; set "
                f"another column of {', '.join(schema.names)}"
            )


def _rows(
    batch: Any, names: list[str], source: DataFiles, place: DataFile, first: int
) -> list[dict[str, Any]]:
    wanted = [*names, *_tools(batch.schema, source)]
    columns = {name: _values(batch.column(name), name, place, first) for name in wanted}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    # A column gives every row all fields that any row has. Those that are absent must look absent to a template.
    return [_without_absent(row) for row in rows] if source.kind == "conversations" else rows


def _values(column: Any, name: str, place: DataFile, first: int) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError:
        for number, value in enumerate(column, start=first):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{place.key}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at offset "
                    f"{error.start:,} of column {name!r} in row {number} of {place}; write the row again as UTF-8"
                ) from None
        raise


def _without_absent(value: Any, top: bool = True) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _without_absent(each, False)
            for name, each in value.items()
            if top or each is not None or name == "content"
        }
    return [_without_absent(each, False) for each in value] if isinstance(value, list) else value


def _pyarrow(place: DataFile) -> Any:
    try:
        pyarrow = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.ipc")
    except ImportError:
        raise UserError(
            f"{place.key}: {place.kind} files need pyarrow, which is not installed; install the extra data"
        ) from None
    return pyarrow


@contextmanager
def _reading(place: DataFile, part: str = "") -> Iterator[None]:
    """Raise pyarrow's errors about a damaged file as a UserError."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, TypeError, KeyError, IndexError, NotImplementedError) as error:
        # pyarrow's errors are among these.
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{place.key}: expected a complete {place.kind} file, found one that pyarrow cannot read: {part}{place} "
            f"({reason}); it is damaged or cut off: copy or write it again"
        ) from None
