"""Bytes of the files of a checkpoint: compared with their digests, and read into the boxes of tensors.

Nothing here communicates, and nothing here knows the description of a checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from math import prod

import torch
from torch import Tensor

from shardwright.checkpoint.format.archive import memory_of
from shardwright.checkpoint.format.boxes import Box, meet, overlap
from shardwright.checkpoint.format.index import Chunk, StoredTensor
from shardwright.checkpoint.format.nested import StateTensor
from shardwright.checkpoint.load.replacement import OpenFiles
from shardwright.checkpoint.storage.stores import Files, Reader
from shardwright.checkpoint.storage.threads import Progress, ignore, in_threads, wait_for_devices
from shardwright.common.errors import Damaged

# -- compared with digests ---------------------------------------------------------------------------------------------


def check_lengths(files: Files, lengths: Mapping[str, int], *, least: bool = False) -> None:
    """Raise Damaged for the first file that is missing or has another length; for ``least`` lengths a lower one."""
    for name, expected in lengths.items():
        nbytes = files.size(name)
        if nbytes < expected or (nbytes > expected and not least):
            at_least = "at least " if least else ""
            raise Damaged(f"{name} holds {nbytes:,} bytes, {at_least}{expected:,} expected")


def check_ranges(
    files: Files, name: str, ranges: Sequence[tuple[int, int, str]], progress: Progress = ignore
) -> None:
    """Compare ranges of a file, each with start, end and digest. Raises Damaged for the first that differs."""
    with closing(files.open(name)) as reader:
        in_threads(ranges, lambda each: _check_range(reader, name, *each), progress)


def _check_range(
    reader: Reader, name: str, start: int, end: int, expected: str, kept: memoryview | None = None
) -> int:
    """Return the length of a range, if its bytes are the ones that were saved.

    They are in ``kept`` then, if it is given.
    """
    buffer = memoryview(bytearray(min(reader.at_once, end - start))) if kept is None else kept
    sha256, position = hashlib.sha256(), start
    while position < end:
        free = buffer if kept is None else kept[position - start :]
        count = reader.read_into(free[: min(reader.at_once, end - position)], position)
        sha256.update(free[:count])
        position += count
    if sha256.hexdigest() != expected:
        raise Damaged(
            f"{name} is not the file that was saved: the SHA-256 of its bytes {start:,} to {end:,} differs"
        )
    return end - start


def compared_values(files: Files, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """Return the values of a chunk, on the host. Raises Damaged if its bytes are not the ones that were saved."""
    container = torch.empty(chunk.length, dtype=torch.uint8)
    with closing(files.open(chunk.file)) as reader:
        _check_range(reader, chunk.file, *chunk.range, memory_of(container))
    begin = chunk.data - chunk.start
    data = container[begin : begin + prod(chunk.sizes) * dtype.itemsize]
    if data.data_ptr() % dtype.itemsize:  # of no writer of ours
        data = data.clone()
    return data.view(dtype).view(chunk.sizes)


# -- read into tensors -------------------------------------------------------------------------------------------------


def reads_of(
    known: Mapping[str, StoredTensor], tensors: Iterable[StateTensor]
) -> list[tuple[Chunk, StoredTensor, Box]]:
    """Parts that this rank needs, in the order of the files."""
    reads: list[tuple[Chunk, StoredTensor, Box]] = []
    for each in tensors:
        stored = known[each.name]
        for box in each.boxes_to_load():
            bounds = box.offsets, box.sizes
            reads += [
                (chunk, stored, box) for chunk in stored.chunks if meet((chunk.offsets, chunk.sizes), bounds)
            ]
    reads.sort(key=lambda read: (read[0].file, read[0].start))
    return reads


def read_boxes(
    files: OpenFiles, known: Mapping[str, StoredTensor], tensors: list[StateTensor], progress: Progress
) -> None:
    """Read every box that this rank needs."""
    reads = reads_of(known, tensors)
    wait_for_devices(box.local for _, _, box in reads)
    for name, of_file in itertools.groupby(reads, lambda read: read[0].file):
        with files.reader(name) as reader:
            _read_of_file(reader, list(of_file), progress)
    wait_for_devices(box.local for _, _, box in reads)


def _read_of_file(reader: Reader, reads: list[tuple[Chunk, StoredTensor, Box]], progress: Progress) -> None:
    def read(each: tuple[Chunk, StoredTensor, Box]) -> int:
        chunk, stored, box = each
        with torch.no_grad():
            read_box(reader, chunk, stored.dtype, box)
        return prod(chunk.sizes) * stored.dtype.itemsize

    in_threads(reads, read, progress)


def read_box(reader: Reader, chunk: Chunk, dtype: torch.dtype, box: Box) -> None:
    """Read what the chunk and the box share. Only the rows of the first dimension that are needed are read, or
    all, if the chunk's elements are not contiguous."""
    shared = overlap((chunk.offsets, chunk.sizes), (box.offsets, box.sizes))
    if shared is None:
        return
    target = shared.of(box.local, box.offsets)
    if chunk.strides is not None:
        strides, count = chunk.strides
        elements = torch.empty(count, dtype=dtype)
        _fill(elements, reader, chunk.data)
        stored = elements.as_strided(chunk.sizes, strides)
        first = 0
    else:
        sizes, skipped, first = list(chunk.sizes), 0, 1
        if sizes:
            skipped = (shared.begins[0] - chunk.offsets[0]) * prod(sizes[1:]) * dtype.itemsize
            sizes[0] = shared.ends[0] - shared.begins[0]
        if _is_plain_memory(target) and target.dtype == dtype and list(target.shape) == sizes:
            _fill(target, reader, chunk.data + skipped)
            torch.autograd.graph.increment_version(target)  # as copy_ does: the engine looks at it
            return
        stored = torch.empty(sizes, dtype=dtype)
        _fill(stored, reader, chunk.data + skipped)
    target.copy_(shared.of(stored, chunk.offsets, first))


def _is_plain_memory(tensor: Tensor) -> bool:
    """Return whether the bytes at its address are its values in their order."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _fill(target: Tensor, reader: Reader, position: int) -> None:
    """Fill a contiguous tensor on the host with the bytes of a file from ``position`` on."""
    rest = memory_of(target)
    while rest:
        count = reader.read_into(rest[: 1 << 30], position)
        rest, position = rest[count:], position + count
