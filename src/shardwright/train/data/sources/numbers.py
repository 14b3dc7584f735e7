"""Tokens that a file holds already: a .npy file with one dimension of whole numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

from shardwright.train.data.sources.items import SPAN, DataFiles, FilePart, Ids, Item, Origin
from shardwright.train.data.sources.places import DataFile, open_place, size_of
from shardwright.train.errors import UserError


def spans(place: DataFile, source: DataFiles) -> Iterator[FilePart]:
    nbytes = size_of(place)
    with open_place(place) as stream:
        count, dtype = _header(place, stream)
        stored = (nbytes - stream.tell()) // dtype.itemsize
    if stored < count:
        raise UserError(
            f"{place.key}: expected {count:,} tokens of {dtype} as the header says, found {stored:,} in {place}; the "
            "file is cut off: copy it again"
        )
    for start in range(0, count, SPAN):
        stop = min(start + SPAN, count)
        yield FilePart(place, start, stop, (stop - start) * dtype.itemsize)


def read(span: FilePart, source: DataFiles) -> Iterator[Item]:
    with open_place(span.place) as stream:
        count, dtype = _header(span.place, stream)
        stream.seek(stream.tell() + span.start * dtype.itemsize)
        content = stream.read((span.stop - span.start) * dtype.itemsize)
    yield Ids(
        np.frombuffer(content, dtype),
        Origin(span.place, "file", span.start),
        first=span.start == 0,
        last=span.stop == count,
    )


def _header(place: DataFile, stream: BinaryIO) -> tuple[int, np.dtype]:
    """Return the number of tokens and their dtype. Leaves the stream at the first one."""
    try:
        version = npy.read_magic(stream)
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"version {version} of the format")
        shape, _, dtype = readers[version](stream)
    except (ValueError, EOFError, SyntaxError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{place.key}: expected a .npy file of tokens, found a damaged one at {place} ({reason}); save it with "
            "numpy.save"
        ) from None
    if dtype.kind not in "ui":
        raise UserError(
            f"{place.key}: expected tokens as whole numbers, found {dtype} in {place}; save ids.astype(numpy.uint32)"
        )
    if len(shape) != 1:
        raise UserError(
            f"{place.key}: expected tokens in one dimension, found the shape {tuple(shape)} in {place}; save "
            "ids.reshape(-1)"
        )
    if shape[0] == 0:
        raise UserError(f"{place.key}: expected tokens, found none in {place}; remove it from {place.key}")
    return int(shape[0]), dtype
