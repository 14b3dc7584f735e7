"""Files of a checkpoint on disk: parts of tensors in a file of each rank, and the small files that describe them.

Nothing here communicates. Every file is on disk (fsync) when its function returns.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright._version import __version__
from shardwright.checkpoint.archive import container
from shardwright.checkpoint.digests import Damaged
from shardwright.checkpoint.folders import METADATA
from shardwright.checkpoint.index import (
    INDEX,
    Index,
    Part,
    StoredFile,
    StoredTensor,
    StoredValue,
    digest_of_parts,
    index_text,
    parse_index,
)
from shardwright.checkpoint.state import Progress, ignore

#: Plain values as ``torch.save`` writes them, for torch's reader. Ours reads them in the index.
VALUES = "__values.distcp"


class PartToWrite(NamedTuple):
    """A box of a tensor, and its values."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Tensor


class Written(NamedTuple):
    """A file of parts that is on disk: for each part the name of its tensor."""

    file: str
    parts: list[tuple[str, Part]]

    @property
    def nbytes(self) -> int:
        return sum(part.length for _, part in self.parts)

    @property
    def sha256(self) -> str:
        return digest_of_parts(part.sha256 for _, part in self.parts)


def file_of_rank(rank: int) -> str:
    """The name of a rank's file, as torch's distributed checkpoint names it."""
    return f"__{rank}_0.distcp"


def bytes_of(tensor: Tensor) -> tuple[memoryview, Tensor]:
    """The bytes of a tensor on the host in its order, and what owns them: a copy if the tensor is not contiguous."""
    held = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not held.nbytes:
        return memoryview(b""), held
    return memoryview((ctypes.c_char * held.nbytes).from_address(held.data_ptr())).cast("B"), held


def write_parts(
    folder: Path, file: str, parts: Iterable[PartToWrite], progress: Progress = ignore
) -> Written:
    """Write a rank's file.

    Raises:
        OSError: the file cannot be written, or is there already. It names the file.
    """
    written: list[tuple[str, Part]] = []
    path = folder / file
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        start = 0
        for part in parts:
            data, held = bytes_of(part.values)
            head, tail = container(held.dtype, part.sizes, data)
            sha256 = hashlib.sha256(head)
            for piece in (data, tail):
                sha256.update(piece)
            length = len(head) + len(data) + len(tail)
            write_all(descriptor, (head, data, tail), path)
            place = Part(part.offsets, part.sizes, file, start, length, start + len(head), sha256.hexdigest())
            written.append((part.name, place))
            start += length
            progress(len(data))
            del data, held
        sync(descriptor, path)
    finally:
        os.close(descriptor)
    return Written(file, written)


def write_all(descriptor: int, pieces: Iterable[bytes | memoryview], path: Path) -> None:
    """Write all bytes at the end of a file. A failure names the file."""
    for piece in pieces:
        rest = memoryview(piece)
        while rest:  # one call writes 2 GiB at most
            try:
                count = os.write(descriptor, rest[: 1 << 30])
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None
            rest = rest[count:]


def sync(descriptor: int, path: Path) -> None:
    """Wait until a file is on disk. A failure names the file."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_file(path: Path, content: bytes) -> StoredFile:
    """Write a small file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, [content], path)
        sync(descriptor, path)
    finally:
        os.close(descriptor)
    return StoredFile(len(content), hashlib.sha256(content).hexdigest(), False)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor, folder)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint is to hold: all but the places of its parts."""

    attempt: str
    ranks: int
    tensors: Mapping[str, tuple[Any, torch.dtype, tuple[int, ...]]]  #: path, dtype and shape by name
    values: Mapping[str, StoredValue]
    about: Mapping[str, str]


def write_descriptions(folder: Path, contents: Contents, written: Sequence[Written]) -> Index:
    """Write what describes a checkpoint: ``.metadata`` and values for torch's reader, and last ``index.json``.

    Raises:
        OSError: a file cannot be written.
        RuntimeError: the parts are not all parts of the tensors.
    """
    parts: dict[str, list[Part]] = {name: [] for name in contents.tensors}
    for each in written:
        for name, part in each.parts:
            parts[name].append(part)
    files = {each.file: StoredFile(each.nbytes, each.sha256, True) for each in written}
    tensors = {
        name: StoredTensor(path, dtype, shape, tuple(sorted(parts[name])))
        for name, (path, dtype, shape) in contents.tensors.items()
    }
    flat = _as_torch_flattens(contents.values)
    places, content = _pickled_values(flat)
    files[VALUES] = write_file(folder / VALUES, content)
    files[METADATA] = write_file(folder / METADATA, _metadata(tensors, flat, places))
    index = Index(contents.attempt, contents.ranks, tensors, contents.values, files, contents.about)
    text = index_text(index).encode()
    try:
        parse_index(text)
    except Damaged as problem:
        raise RuntimeError(f"the ranks have written parts that are no whole checkpoint: {problem}") from None
    write_file(folder / INDEX, text)
    return index


# -- for torch's reader ------------------------------------------------------------------------------------------------


def _as_torch_flattens(values: Mapping[str, StoredValue]) -> dict[str, tuple[tuple[str | int, ...], Any]]:
    """Each value under the names under which torch's distributed checkpoint looks for it."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat: dict[str, tuple[tuple[str | int, ...], Any]] = {}
    for name, stored in values.items():
        prefix = _steps(stored.path)
        inner, paths = flatten_state_dict({"": stored.value})
        for key, value in inner.items():
            flat[name + key] = ((*prefix, *paths[key][1:]), value)
    return flat


def _steps(path: Sequence[Any]) -> tuple[str | int, ...]:
    return tuple(str(step[0]) if isinstance(step, tuple) else step for step in path)


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
    """Without classes of other libraries, which torch's reader would have to import."""
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
) -> bytes:
    """The pickle that torch's own writer would leave for these parts."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
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
    for name, tensor in tensors.items():
        chunks = []
        for part in tensor.parts:
            offsets = torch.Size(part.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.sizes)))
            storage[MetadataIndex(name, offsets)] = _StorageInfo(part.file, part.start, part.length)
        properties = TensorProperties(dtype=tensor.dtype)
        entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    for name, (start, length) in places.items():
        entries[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = _StorageInfo(VALUES, start, length)
    paths = {name: _steps(tensor.path) for name, tensor in tensors.items()}
    paths.update({name: path for name, (path, _) in flat.items()})
    metadata = Metadata(entries, planner_data=paths, storage_data=storage, storage_meta=StorageMeta())
    return pickle.dumps(metadata, protocol=4)


def about() -> dict[str, str]:
    """Versions of what writes a checkpoint."""
    return {"shardwright": __version__, "torch": re.sub(r"\+.*", "", torch.__version__)}
