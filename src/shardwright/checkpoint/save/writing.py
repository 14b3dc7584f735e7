"""The files of a checkpoint: chunks of tensors in a file of each rank, and the small files that describe them.

Nothing here communicates. Every file is durable when its function returns.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardwright.checkpoint.format.archive import container, host_bytes, lengths
from shardwright.checkpoint.format.boxes import Box
from shardwright.checkpoint.format.index import (
    Chunk,
    Index,
    StoredFile,
    StoredTensor,
    StoredValue,
    TensorForm,
    digest_of_chunks,
    index_text,
    parse_index,
)
from shardwright.checkpoint.format.names import INDEX, METADATA, VALUES, VALUES_FOR_TORCH
from shardwright.checkpoint.storage.stores import UnfinishedSave, Writer
from shardwright.checkpoint.storage.threads import Progress, ignore, in_threads, wait_for_devices
from shardwright.common.errors import Damaged
from shardwright.common.package import __version__
from shardwright.engine.compat import flatten_state_dict, storage_info


class BoxToWrite(NamedTuple):
    """A box of the tensor of this name, which a rank writes."""

    name: str
    box: Box


class WrittenFile(NamedTuple):
    """A file of chunks that is on disk: for each chunk the name of its tensor."""

    file: str
    chunks: list[tuple[str, Chunk]]

    @property
    def nbytes(self) -> int:
        return sum(chunk.length for _, chunk in self.chunks)

    @property
    def sha256(self) -> str:
        return digest_of_chunks(chunk.sha256 for _, chunk in self.chunks)


def write_boxes(
    save: UnfinishedSave, file: str, boxes: Iterable[BoxToWrite], progress: Progress = ignore
) -> WrittenFile:
    """Write a rank's file. It has the name under which the save stores it.

    Raises:
        OSError: the file cannot be written, or is there already. It names the file.
    """
    placed, end = [], 0
    for each in boxes:
        placed.append((end, each))
        head, tail = lengths(each.box.local.dtype, each.box.sizes)
        end += head + each.box.local.nbytes + tail
    wait_for_devices(each.box.local for _, each in placed)
    with _new_file(save, file) as (writer, name):
        if writer.in_order:
            return _written_in_order(writer, name, (each for _, each in placed), progress)

        def write(each: tuple[int, BoxToWrite]) -> tuple[str, Chunk]:
            return _write_box(writer, name, *each)

        # In threads, because hashing takes longer than writing, and both let go of the interpreter.
        return WrittenFile(name, in_threads(placed, write, lambda each: progress(each[1].length)))


def write_boxes_in_order(save: UnfinishedSave, file: str, boxes: Iterable[BoxToWrite]) -> WrittenFile:
    """Write a file as :func:`write_boxes` does, of boxes that are read while it is written: one is in memory."""
    with _new_file(save, file) as (writer, name):
        return _written_in_order(writer, name, boxes, ignore)


@contextlib.contextmanager
def _new_file(save: UnfinishedSave, file: str) -> Iterator[tuple[Writer, str]]:
    """A file to write, and the name under which it is stored. It is durable after the block."""
    name = save.stored_name(file)
    writer = save.create(name)
    try:
        yield writer, name
        writer.finish()
    except BaseException:
        writer.discard()
        raise


def _written_in_order(
    writer: Writer, file: str, boxes: Iterable[BoxToWrite], progress: Progress
) -> WrittenFile:
    written: list[tuple[str, Chunk]] = []
    end = 0
    for each in boxes:
        written.append(_write_box(writer, file, end, each))
        del each  # so that the next box is not read while this one is in memory
        end += written[-1][1].length
        progress(written[-1][1].length)
    return WrittenFile(file, written)


def _write_box(writer: Writer, file: str, start: int, each: BoxToWrite) -> tuple[str, Chunk]:
    """Write a box as a chunk at its place, and digest it."""
    name, box = each
    data, _held = host_bytes(box.local)
    head, tail = container(box.local.dtype, box.sizes, data)
    sha256, position = hashlib.sha256(), start
    for piece in (head, data, tail):
        writer.write(piece, position)
        sha256.update(piece)
        position += len(piece)
    length = position - start
    chunk = Chunk(box.offsets, box.sizes, file, start, length, start + len(head), sha256.hexdigest())
    return name, chunk


def _write_file(save: UnfinishedSave, name: str, content: bytes) -> StoredFile:
    save.write(name, content)
    return StoredFile(len(content), hashlib.sha256(content).hexdigest(), False)


@dataclass(frozen=True)
class Contents:
    """The content of a checkpoint to write, without the places of its chunks."""

    attempt: str
    ranks: int
    tensors: Mapping[str, TensorForm]
    values: Mapping[str, StoredValue]
    about: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(form.nbytes for form in self.tensors.values())


def write_descriptions(
    save: UnfinishedSave, contents: Contents, written: Sequence[WrittenFile], *, for_torch: bool = False
) -> Index:
    """Write what describes a checkpoint: ``.metadata`` and values for torch's reader, and last ``index.json``.

    A checkpoint that is ``for_torch`` gets no index.

    Raises:
        OSError: a file cannot be written.
        RuntimeError: the chunks are not all of the tensors.
    """
    chunks: dict[str, list[Chunk]] = {name: [] for name in contents.tensors}
    for each in written:
        for name, chunk in each.chunks:
            chunks[name].append(chunk)
    files = {each.file: StoredFile(each.nbytes, each.sha256, True) for each in written}
    tensors = {
        name: StoredTensor(form.path, form.dtype, form.shape, tuple(sorted(chunks[name])))
        for name, form in contents.tensors.items()
    }
    flat = _as_torch_flattens(contents.values)
    places, content = _pickled_values(flat)
    file = save.stored_name(VALUES_FOR_TORCH if for_torch else VALUES)
    files[file] = _write_file(save, file, content)
    files[METADATA] = _write_file(save, METADATA, _metadata(tensors, flat, places, file))
    index = Index(contents.attempt, contents.ranks, tensors, contents.values, files, contents.about)
    text = index_text(index).encode()
    try:
        parse_index(text)
    except Damaged as problem:
        raise RuntimeError(f"the ranks have written parts that are no whole checkpoint: {problem}") from None
    if not for_torch:
        save.write(save.stored_name(INDEX), text)
    return index


# -- for torch's reader ------------------------------------------------------------------------------------------------


def _as_torch_flattens(values: Mapping[str, StoredValue]) -> dict[str, tuple[tuple[str | int, ...], Any]]:
    """Return each value under the names under which torch's distributed checkpoint looks for it."""
    flat: dict[str, tuple[tuple[str | int, ...], Any]] = {}
    for name, stored in values.items():
        prefix = _steps(stored.path)
        inner, paths = flatten_state_dict({"": stored.value})
        for key, value in inner.items():
            flat[name + key] = ((*prefix, *paths[key][1:]), value)
    return flat


def _steps(path: Sequence[Any]) -> tuple[str | int, ...]:
    steps = (str(step[0]) if isinstance(step, tuple) else step for step in path)
    return tuple(sys.intern(str(step)) if isinstance(step, str) else step for step in steps)


def _pickled_values(flat: Mapping[str, tuple[Any, Any]]) -> tuple[dict[str, tuple[int, int]], bytes]:
    stream = io.BytesIO()
    places = {}
    for name, (_, value) in sorted(flat.items()):
        start = stream.tell()
        single = io.BytesIO()
        torch.save(_plain(value), single)
        stream.write(single.getvalue())
        places[name] = (start, stream.tell() - start)
    return places, stream.getvalue()


def _plain(value: Any) -> Any:
    """Return a value without classes of other libraries, which torch's reader would have to import."""
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else tuple(map(_plain, value))
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _metadata(
    tensors: Mapping[str, StoredTensor],
    flat: Mapping[str, tuple[tuple[str | int, ...], Any]],
    places: Mapping[str, tuple[int, int]],
    values_file: str,
) -> bytes:
    """Return the pickle that torch's own writer would leave for these chunks."""
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    # A pickle refers to an object that it holds already, so equal strings have to be one object: then equal states give
    # equal bytes.
    tensors = {sys.intern(name): each for name, each in tensors.items()}
    flat = {sys.intern(name): each for name, each in flat.items()}
    places = {sys.intern(name): each for name, each in places.items()}
    for name, tensor in tensors.items():
        chunks = []
        for chunk in tensor.chunks:
            offsets = torch.Size(chunk.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
            storage[MetadataIndex(name, offsets)] = storage_info(
                sys.intern(chunk.file), chunk.start, chunk.length
            )
        properties = TensorProperties(dtype=tensor.dtype)
        entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    for name, (start, length) in places.items():
        entries[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = storage_info(sys.intern(values_file), start, length)
    paths = {name: _steps(tensor.path) for name, tensor in tensors.items()}
    paths.update({name: _steps(path) for name, (path, _) in flat.items()})
    metadata = Metadata(entries, planner_data=paths, storage_data=storage, storage_meta=StorageMeta())
    return pickle.dumps(metadata, protocol=4)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that write a checkpoint."""
    return {"shardwright": __version__, "torch": re.sub(r"\+.*", "", torch.__version__)}
