"""A checkpoint in any form that can be converted, as names of tensors and values that are read one at a time.

Forms: ours, folders of torch's distributed checkpoint, safetensors, and files of ``torch.save``. Opening one reads what
describes it; nothing in it is called. A tensor of ours is compared with its digests while it is read.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from shardwright.checkpoint.dcp.folders import check_sizes, files_of, not_plain
from shardwright.checkpoint.format.digests import Damaged, open_regular
from shardwright.checkpoint.format.index import Index, Part, StoredTensor, StoredValue
from shardwright.checkpoint.format.index import Path as Keys
from shardwright.checkpoint.format.nested import NestedState, nested
from shardwright.checkpoint.load.loading import check_lengths, fill, read_description
from shardwright.checkpoint.pretrained.files import TORCH_SUFFIXES, load_torch, open_stored
from shardwright.checkpoint.save.writing import bytes_of
from shardwright.checkpoint.storage.places import is_checkpoint
from shardwright.checkpoint.storage.stores import Files, Store

SHARDWRIGHT, DCP, SAFETENSORS, TORCH = "shardwright", "dcp", "safetensors", "torch"


@dataclass(frozen=True)
class SourceTensor:
    """A tensor that can be read.

    Attributes:
        path: its keys in the nested state.
        dtype, shape: as stored.
        read: its values as a contiguous tensor on the host; in another dtype if that is given. Raises Damaged.
    """

    path: Keys
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[torch.dtype], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class InputCheckpoint:
    """The content of a checkpoint: its tensors and values, and how to read them.

    Attributes:
        path, form: where it is, and :data:`SHARDWRIGHT`, :data:`DCP`, :data:`SAFETENSORS` or :data:`TORCH`.
        tensors: by name; in the order in which they are best read.
        value_paths: the keys of each value that is no tensor, by its name.
        values: reads these values. Raises Damaged for one that is not plain.
        ranks: that wrote it, where that is known.
    """

    path: Path | Store
    form: str
    tensors: Mapping[str, SourceTensor]
    value_paths: Mapping[str, Keys] = field(default_factory=dict)
    values: Callable[[], Mapping[str, StoredValue]] = dict
    ranks: int = 1

    @property
    def is_flat(self) -> bool:
        """Whether it holds tensors under single names, as files of weights do."""
        return bool(self.tensors) and all(len(each.path) == 1 for each in self.tensors.values())


def open_source(location: Path | Store) -> InputCheckpoint:
    """Read what describes a checkpoint. Behind a URL there may be one of ours.

    Raises:
        FileNotFoundError: there is nothing.
        Damaged: it contradicts itself, or files are missing.
        ValueError: it has another form.
        OSError: the store behind a URL does not answer.
    """
    path = location if isinstance(location, Path) else location.path or location
    if not isinstance(path, Path) or (path.is_dir() and is_checkpoint(path)):
        try:
            checkpoint = read_description(path)
            if checkpoint.index is not None:
                check_lengths(checkpoint)
                return _ours(path, checkpoint.place, checkpoint.index)
            path = checkpoint.folder
            assert checkpoint.metadata is not None
            return _of_dcp(path, checkpoint.metadata)
        except Damaged as problem:
            raise Damaged(f"{path} is damaged: {problem}") from problem
    if path.is_file() and path.suffix in TORCH_SUFFIXES:
        return _of_torch(path)
    if (path / "checkpoints").is_dir():
        newest = max(
            (path / "checkpoints").glob("step-*"), key=lambda each: each.stat().st_mtime, default=None
        )
        example = newest if newest is not None else path / "checkpoints" / "step-N"
        raise ValueError(f"{path} is a run. Give one of its checkpoints, such as {example}")
    stored = open_stored(path)
    form = SAFETENSORS if all(each.file.suffix == ".safetensors" for each in stored.values()) else TORCH
    ordered = sorted(stored.items(), key=lambda item: (str(item[1].file), item[1].position))
    return InputCheckpoint(
        path,
        form,
        {
            name: SourceTensor((name,), each.dtype, tuple(each.shape), _viewed(each.view))
            for name, each in ordered
        },
    )


def _viewed(view: Callable[[], Tensor]) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: view().to(dtype).contiguous()


def _of_torch(path: Path) -> InputCheckpoint:
    content = load_torch(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dict, so its tensors have no names")
    state = NestedState.of(content)
    for each in state.tensors.values():
        each.boxes_to_save()  # raises an error for tensors without dense values
    tensors = {
        name: SourceTensor(each.path, each.dtype, each.shape, _viewed(each.tensor.detach))
        for name, each in state.tensors.items()
    }
    return InputCheckpoint(path, TORCH, tensors, _paths(state.values), lambda: state.values)


def _paths(values: Mapping[str, StoredValue]) -> dict[str, Keys]:
    return {name: each.path for name, each in values.items()}


# -- ours --------------------------------------------------------------------------------------------------------------


def _ours(path: Path | Store, files: Files, index: Index) -> InputCheckpoint:
    first = {name: min((p.file, p.start) for p in each.parts) if each.parts else ("", 0)
             for name, each in index.tensors.items()}  # fmt: skip
    tensors = {
        name: SourceTensor(each.path, each.dtype, each.shape, partial(_read_ours, files, each))
        for name, each in sorted(index.tensors.items(), key=lambda item: first[item[0]])
    }
    return InputCheckpoint(
        path, SHARDWRIGHT, tensors, _paths(index.values), lambda: index.values, index.ranks
    )


def _read_ours(files: Files, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    whole = torch.empty(stored.shape, dtype=dtype)
    for part in stored.parts:
        _box(whole, part.offsets, part.sizes).copy_(_verified(files, part, stored.dtype))
    return whole


def _verified(files: Files, part: Part, dtype: torch.dtype) -> Tensor:
    """The values of a part, whose container has the digest of the index."""
    reader = files.open(part.file)
    try:
        container = torch.empty(part.length, dtype=torch.uint8)
        fill(container, reader, part.start)
    except Damaged as problem:
        raise Damaged(f"{files} is damaged: {problem}") from None
    finally:
        reader.close()
    if hashlib.sha256(bytes_of(container)[0]).hexdigest() != part.sha256:
        raise Damaged(
            f"{files} is damaged: {part.file} is not the file that was saved: the SHA-256 of its bytes "
            f"{part.start:,} to {part.start + part.length:,} differs"
        )
    begin = part.data - part.start
    data = container[begin : begin + prod(part.sizes) * dtype.itemsize]
    if data.data_ptr() % dtype.itemsize:  # of no writer of ours
        data = data.clone()
    return data.view(dtype).view(part.sizes)


def _box(whole: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


# -- torch's distributed checkpoint ------------------------------------------------------------------------------------


def _of_dcp(path: Path, metadata: Metadata) -> InputCheckpoint:
    check_sizes(path, files_of(metadata))
    paths = metadata.planner_data or {}
    entries = metadata.state_dict_metadata
    leaves: dict[Any, Any] = {}
    names: dict[int, str] = {}
    for name, entry in entries.items():
        leaf: Any = name
        if isinstance(entry, TensorStorageMetadata):
            leaf = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            names[id(leaf)] = name
        leaves[paths.get(name, (name,))] = leaf
    try:
        state = NestedState.of(nested(leaves))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"the keys of its values contradict one another ({error})") from None
    if len(leaves) < len(entries):
        raise Damaged("two of its values have the same keys")
    tensors = {}
    for name, each in state.tensors.items():
        stored_name = names[id(each.tensor)]
        read = partial(_read_dcp, path, metadata, stored_name)
        tensors[name] = SourceTensor(each.path, each.dtype, each.shape, read)

    def values() -> Mapping[str, StoredValue]:
        return {
            name: StoredValue(each.path, _filled(each.value, path, metadata))
            for name, each in state.values.items()
        }

    return InputCheckpoint(path, DCP, tensors, _paths(state.values), values)


def _filled(value: Any, path: Path, metadata: Metadata) -> Any:
    """A nested value, whose leaves are names of stored values, with the values."""
    if isinstance(value, Mapping):
        return {key: _filled(each, path, metadata) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, path, metadata) for each in value]
    return _loaded(path, metadata, MetadataIndex(value))


def _read_dcp(folder: Path, metadata: Metadata, name: str, dtype: torch.dtype) -> Tensor:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    if len(entry.chunks) == 1:  # then one tensor is in memory, not two
        return _chunk(folder, metadata, name, entry, entry.chunks[0]).to(dtype)
    whole = torch.empty(entry.size, dtype=dtype)
    for chunk in entry.chunks:
        values = _chunk(folder, metadata, name, entry, chunk)
        _box(whole, tuple(chunk.offsets), tuple(chunk.sizes)).copy_(values)
    return whole


def _chunk(
    folder: Path, metadata: Metadata, name: str, entry: TensorStorageMetadata, chunk: ChunkStorageMetadata
) -> Tensor:
    index = MetadataIndex(name, chunk.offsets)
    dtype, nbytes = entry.properties.dtype, prod(chunk.sizes) * entry.properties.dtype.itemsize
    if nbytes > metadata.storage_data[index].length:
        raise Damaged(f"{folder} is damaged: a part of {name!r} has fewer bytes than its shape needs")
    values = _loaded(folder, metadata, index)
    if (
        type(values) is not Tensor
        or values.layout is not torch.strided
        or values.device.type != "cpu"
        or (values.dtype, values.shape) != (dtype, chunk.sizes)
    ):
        raise Damaged(
            f"{folder} is damaged: a part of {name!r} is not the tensor that its .metadata describes"
        )
    return values.detach().contiguous()


def _loaded(folder: Path, metadata: Metadata, index: MetadataIndex) -> Any:
    """The tensor or value in a range of a file, by ``torch.load`` with ``weights_only=True``."""
    place, name = metadata.storage_data[index], index.fqn
    descriptor = open_regular(folder / place.relative_path)
    with io.FileIO(descriptor, "r") as file:
        section = _FileSection(file, place.offset, place.length)
        try:
            with zipfile.ZipFile(section) as records:  # type: ignore[arg-type]
                # Otherwise a small file could fill the memory.
                if any(each.compress_type != zipfile.ZIP_STORED for each in records.infolist()):
                    raise Damaged(
                        f"{folder} is damaged: {name!r} is compressed, which torch's writer does not do"
                    )
            section.seek(0)
            return torch.load(section, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        except pickle.UnpicklingError as error:
            raise Damaged(f"{folder}: {name!r} {not_plain(error)}") from error
        except (Damaged, MemoryError):
            raise
        except Exception as error:  # damaged bytes can raise nearly any exception
            raise Damaged(
                f"{folder} is damaged: torch.load cannot read {name!r} in {place.relative_path} "
                f"({type(error).__name__})"
            ) from error


class _FileSection(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        count = os.preadv(self._file.fileno(), [view], self._start + self._at) if view else 0
        self._at += count
        return count
