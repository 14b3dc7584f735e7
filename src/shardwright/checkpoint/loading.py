"""Reads a checkpoint into tensors: examined, compared with its digests, and only then read, by all ranks together.

Our own checkpoints are read from ``index.json`` alone. A folder of torch's distributed checkpoint is read through its
``.metadata`` by an unpickler that calls nothing. Then every rank reads what its boxes need. No function here changes a
tensor before every rank has found the checkpoint whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from shardwright.checkpoint import folders, places
from shardwright.checkpoint.digests import (
    Damaged,
    Digest,
    check_digest,
    open_regular,
    read_regular,
    share,
    size_of,
)
from shardwright.checkpoint.index import INDEX, LARGEST, Index, Part, StoredTensor, parse_index
from shardwright.checkpoint.ranks import Ranks
from shardwright.checkpoint.state import Box, NamedTensor, Progress, State, ignore, nested


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose description is sound. Its files may still be damaged: :func:`verify` compares them."""

    folder: Path
    index: Index | None  #: None of a folder by torch's writer
    metadata: Metadata | None  #: of a folder by torch's writer
    fingerprint: str  #: SHA-256 of the description; ranks that read another one notice

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of each tensor."""
        if self.index is not None:
            return {name: (each.dtype, each.shape) for name, each in self.index.tensors.items()}
        assert self.metadata is not None
        return {
            name: (entry.properties.dtype, tuple(entry.size))
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def files(self) -> dict[str, int]:
        """The bytes of each file apart from the description; of torch's folders the least there can be."""
        if self.index is not None:
            return {name: file.nbytes for name, file in self.index.files.items()}
        assert self.metadata is not None
        return folders.files_of(self.metadata)


def open_checkpoint(path: Path, *, links: bool = False) -> Checkpoint:
    """Read what describes a checkpoint. Nothing that it says is called.

    Raises:
        FileNotFoundError: there is no folder.
        Damaged: the folder holds no checkpoint, or its description contradicts itself.
    """
    places.recover(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: there is no checkpoint")
    if os.path.lexists(path / INDEX):
        if (nbytes := size_of(path / INDEX, links)) > LARGEST:
            raise Damaged(f"{INDEX} holds {nbytes:,} bytes, at most {LARGEST:,} are read")
        text = read_regular(path / INDEX, links)
        return Checkpoint(path, parse_index(text), None, hashlib.sha256(text).hexdigest())
    if not os.path.lexists(path / folders.METADATA):
        raise Damaged(f"the folder has neither {INDEX} nor {folders.METADATA}, so it holds no checkpoint")
    if (nbytes := size_of(path / folders.METADATA, links)) > LARGEST:
        raise Damaged(f"{folders.METADATA} holds {nbytes:,} bytes, at most {LARGEST:,} are read")
    data = read_regular(path / folders.METADATA, links)
    metadata = folders.parse_metadata(data)
    return Checkpoint(path, None, metadata, hashlib.sha256(data).hexdigest())


def verify(checkpoint: Checkpoint, rank: int = 0, ranks: int = 1, progress: Progress = ignore) -> None:
    """Compare the share of a rank of all files with their digests; of torch's folders the sizes.

    Raises:
        Damaged: names the first file that differs.
    """
    index = checkpoint.index
    if index is None:
        folders.check_sizes(checkpoint.folder, checkpoint.files())
        return
    for name, file in index.files.items():
        if (nbytes := size_of(checkpoint.folder / name)) != file.nbytes:
            raise Damaged(f"{name} holds {nbytes:,} bytes, {file.nbytes:,} expected")
    by_file = index.parts_of_files()
    sizes = {name: file.nbytes for name, file in index.files.items() if not file.has_parts}
    parts = {f"{name}:{n:09d}": part for name, found in by_file.items() for n, part in enumerate(found)}
    sizes.update({key: part.length for key, part in parts.items()})
    mine = share(sizes, rank, ranks)
    of_file: dict[str, list[Part]] = {}
    for key in sorted(mine):
        if key in parts:
            of_file.setdefault(parts[key].file, []).append(parts[key])
        else:
            expected = index.files[key]
            check_digest(checkpoint.folder / key, Digest(expected.nbytes, expected.sha256), progress)
    for name, found in of_file.items():
        _check_parts(checkpoint.folder / name, found, progress)


def _check_parts(file: Path, parts: list[Part], progress: Progress) -> None:
    buffer = memoryview(bytearray(min(1 << 22, max(part.length for part in parts))))
    descriptor = open_regular(file)
    try:
        for part in parts:
            sha256, position, end = hashlib.sha256(), part.start, part.start + part.length
            while position < end:
                count = _read(descriptor, buffer[: min(len(buffer), end - position)], position, file)
                sha256.update(buffer[:count])
                position += count
                progress(count)
            if sha256.hexdigest() != part.sha256:
                raise Damaged(
                    f"{file.name} is not the file that was saved: the SHA-256 of its bytes {part.start:,} to {end:,} "
                    "differs"
                )
    finally:
        os.close(descriptor)


def _read(descriptor: int, target: memoryview, position: int, file: Path) -> int:
    try:
        count = os.preadv(descriptor, [target], position)
    except OSError as error:
        raise Damaged(f"{file.name} cannot be read: {error.strerror}") from None
    if not count:
        raise Damaged(f"{file.name} ends at byte {position:,}")
    return count


# -- by all ranks ------------------------------------------------------------------------------------------------------


def open_together(
    path: Path, ranks: Ranks, check: Callable[[Checkpoint], None], progress: Progress = ignore
) -> Checkpoint:
    """A checkpoint that every rank has found whole, and that ``check`` accepts. Every rank must call it.

    Raises:
        FileNotFoundError, Damaged: on every rank, as :func:`open_checkpoint` and :func:`verify`; and what ``check``
            raises.
    """
    opened: list[Checkpoint] = []

    def look() -> str:
        opened.append(open_checkpoint(path))
        check(opened[0])
        return opened[0].fingerprint

    prints = ranks.together(look)
    other = next((rank for rank, each in enumerate(prints) if each != prints[0]), None)
    if other is not None:
        raise Damaged(f"rank {other} reads another description of the checkpoint than rank 0")
    ranks.together(lambda: verify(opened[0], ranks.rank, ranks.size, progress))
    return opened[0]


def load_state(
    path: Path,
    state: Mapping[str, Any],
    ranks: Ranks,
    *,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    weights_only: bool = True,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Read into the tensors of a nested state, in place; return the values and tensors that the state does not have.

    Every rank must call it. Tensors of the state get their values from any cut and any number of ranks.

    Args:
        path: the checkpoint's folder.
        state: nested dicts and lists. Only its tensors count; its values are not changed.
        check: called with the checkpoint on every rank before anything is read; may raise.
        weights_only: for values in torch's folders, as for ``torch.load``.
        progress: gets the number of bytes as they are compared and read.

    Returns:
        The values of the checkpoint, nested; from a folder by torch's writer only those below the keys of ``state``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        Damaged: it is not whole. No tensor was changed, unless a file could be read at first and then not again.
        ValueError: a tensor is missing in it, or has another shape or dtype. No tensor was changed.
    """
    mine = State.of(state)

    def fits(checkpoint: Checkpoint) -> None:
        check(checkpoint)
        check_tensors(path, checkpoint, mine.tensors)

    checkpoint = open_together(path, ranks, fits, progress)
    if checkpoint.index is None:
        return _load_of_torch(checkpoint, mine.tensors, state.keys(), ranks, weights_only)
    index = checkpoint.index
    ranks.together(lambda: _read_tensors(checkpoint.folder, index, list(mine.tensors.values()), progress))
    return nested({each.path: each.value for each in index.values.values()})  # type: ignore[no-any-return]


def check_tensors(path: Path, checkpoint: Checkpoint, tensors: Mapping[str, NamedTensor]) -> None:
    """Raise ValueError for the first tensor that the checkpoint does not have in this shape and dtype."""
    stored = checkpoint.shapes()
    for name, each in tensors.items():
        if name not in stored:
            raise ValueError(f"{path} has no tensor {name}")
        dtype, shape = stored[name]
        if shape != each.shape:
            raise ValueError(f"{path}: {name} has shape {list(shape)}, expected {list(each.shape)}")
        if dtype != each.dtype:
            raise ValueError(f"{path}: {name} has dtype {dtype}, expected {each.dtype}")


def _load_of_torch(
    checkpoint: Checkpoint,
    tensors: Mapping[str, NamedTensor],
    keys: Container[str],
    ranks: Ranks,
    weights_only: bool,
) -> dict[str, Any]:
    """Read a folder by torch's writer; return its values below ``keys``."""
    metadata = checkpoint.metadata
    assert metadata is not None
    paths = metadata.planner_data or {}
    places = {
        name: paths.get(name, (name,))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, BytesStorageMetadata)
    }
    values = {name: path for name, path in places.items() if path[0] in keys}
    flat: dict[str, Any] = {name: each.tensor for name, each in tensors.items()} | dict.fromkeys(values)
    folders.load(checkpoint.folder, flat, metadata, alone=ranks.alone, weights_only=weights_only)
    return nested({path: flat[name] for name, path in values.items()})  # type: ignore[no-any-return]


@torch.no_grad()
def _read_tensors(folder: Path, index: Index, tensors: list[NamedTensor], progress: Progress) -> None:
    """Read every box that this rank needs, in the order of the files."""
    reads: list[tuple[Part, StoredTensor, Box]] = []
    for each in tensors:
        stored = index.tensors[each.name]
        for box in each.boxes_to_load():
            reads += [(part, stored, box) for part in stored.parts if _meet(part, box)]
    reads.sort(key=lambda read: (read[0].file, read[0].start))
    descriptors: dict[str, int] = {}
    try:
        for part, stored, box in reads:
            if part.file not in descriptors:
                for descriptor in descriptors.values():
                    os.close(descriptor)
                descriptors.clear()
                descriptors[part.file] = open_regular(folder / part.file)
            _read_box(descriptors[part.file], folder / part.file, part, stored.dtype, box)
            progress(prod(part.sizes) * stored.dtype.itemsize)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _meet(part: Part, box: Box) -> bool:
    return all(
        a < b + n and b < a + m
        for a, m, b, n in zip(part.offsets, part.sizes, box.offsets, box.sizes, strict=True)
    )


def _read_box(descriptor: int, file: Path, part: Part, dtype: torch.dtype, box: Box) -> None:
    """Read what the part and the box share. Of the part's first dimension only the rows that are needed are read."""
    dims = range(len(part.sizes))
    begin = [max(part.offsets[d], box.offsets[d]) for d in dims]
    end = [min(part.offsets[d] + part.sizes[d], box.offsets[d] + box.sizes[d]) for d in dims]
    sizes, skipped = list(part.sizes), 0
    if sizes:
        skipped = (begin[0] - part.offsets[0]) * prod(sizes[1:]) * dtype.itemsize
        sizes[0] = end[0] - begin[0]
    stored = torch.empty(sizes, dtype=dtype)
    read_into(descriptor, file, part.data + skipped, stored)
    target = box.local
    for dim in dims:
        if dim:
            stored = stored.narrow(dim, begin[dim] - part.offsets[dim], end[dim] - begin[dim])
        target = target.narrow(dim, begin[dim] - box.offsets[dim], end[dim] - begin[dim])
    target.copy_(stored)


def read_into(descriptor: int, file: Path, position: int, target: Tensor) -> None:
    """Fill a contiguous tensor on the host with the bytes of a file from ``position`` on."""
    if not target.nbytes:
        return
    rest = memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")
    while rest:
        count = _read(descriptor, rest[: 1 << 30], position, file)
        rest, position = rest[count:], position + count


def read_tensors(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], ranks: Ranks, progress: Progress = ignore
) -> None:
    """Read into tensors, by the names of the checkpoint; they have the stored shapes. Every rank must call it.

    Args:
        checkpoint: one that every rank has found whole.
        tensors: with memory on this rank. Values are converted to their dtypes.

    Raises:
        Damaged: a file could be read before and cannot be read now.
    """
    if (index := checkpoint.index) is not None:
        named = [NamedTensor(name, index.tensors[name].path, each) for name, each in tensors.items()]
        ranks.together(lambda: _read_tensors(checkpoint.folder, index, named, progress))
        return
    assert checkpoint.metadata is not None
    folders.load(checkpoint.folder, dict(tensors), checkpoint.metadata, alone=ranks.alone)
