"""Reads a checkpoint into tensors: examined, compared with its digests, and only then read, by all ranks together.

Our own checkpoints are read from ``index.json`` alone. A folder of torch's distributed checkpoint is read through its
``.metadata`` by an unpickler that calls nothing. Then every rank reads what its boxes need. No function here changes a
tensor before every rank has found the checkpoint whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwright import board as boards
from shardwright.checkpoint import folders, foreign, places
from shardwright.checkpoint.digests import (
    Damaged,
    Digest,
    check_digest,
    open_regular,
    read_regular,
    share,
    size_of,
)
from shardwright.checkpoint.foreign import Strides
from shardwright.checkpoint.index import INDEX, LARGEST, Index, Part, StoredTensor, parse_index
from shardwright.checkpoint.ranks import Ranks
from shardwright.checkpoint.state import Box, NamedTensor, Progress, State, ignore, meet, nested
from shardwright.checkpoint.threads import in_threads, wait_for_devices
from shardwright.checkpoint.writing import VALUES


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose description is sound. Its files may still be damaged: :func:`verify` compares them."""

    folder: Path
    index: Index | None  #: None of a folder by torch's writer
    metadata: Metadata | None  #: of a folder by torch's writer
    fingerprint: str  #: SHA-256 of the description; ranks that read another one notice
    links: bool = False  #: whether files of torch's writer may be behind links

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

    def names(self) -> set[str]:
        """Of all tensors and values."""
        if self.index is not None:
            return {*self.index.tensors, *self.index.values}
        assert self.metadata is not None
        return set(self.metadata.state_dict_metadata)

    def files(self) -> dict[str, int]:
        """The bytes of each file apart from the description; of torch's folders the least there can be."""
        if self.index is not None:
            return {name: file.nbytes for name, file in self.index.files.items()}
        assert self.metadata is not None
        return folders.files_of(self.metadata)


def open_checkpoint(path: Path, *, links: bool = False) -> Checkpoint:
    """Read what describes a checkpoint. Nothing that it says is called.

    Where there is an ``index.json``, it alone is read, whatever ``.metadata`` says. Our files without it are damaged; a
    folder that has only torch's files has no digests.

    Raises:
        FileNotFoundError: there is no folder.
        Damaged: the folder holds no checkpoint, or its description contradicts itself.
        UnknownVersion: its description is of a later version of the format.
    """
    places.recover(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: there is no checkpoint")
    if os.path.lexists(path / INDEX):  # whatever .metadata says
        text = _description(path / INDEX, b'"}\n', links)
        return Checkpoint(path, parse_index(text), None, hashlib.sha256(text).hexdigest())
    if not os.path.lexists(path / folders.METADATA):
        raise Damaged(f"the folder has neither {INDEX} nor {folders.METADATA}, so it holds no checkpoint")
    if os.path.lexists(path / VALUES):
        raise Damaged(
            f"{INDEX} is missing beside {VALUES}, so nothing can be compared with its digest; read the folder with "
            "torch.distributed.checkpoint if you trust it"
        )
    data = _description(path / folders.METADATA, b".", links)
    metadata = folders.parse_metadata(data)
    return Checkpoint(path, None, metadata, hashlib.sha256(data).hexdigest(), links)


def _description(file: Path, end: bytes, links: bool) -> bytes:
    """The content of a file that describes a checkpoint. Its end is read first: of a file that is cut off or has holes
    no more is read."""
    nbytes = size_of(file, links)
    if nbytes > LARGEST:
        raise Damaged(f"{file.name} holds {nbytes:,} bytes, at most {LARGEST:,} are read")
    descriptor = open_regular(file, links)
    try:
        if os.pread(descriptor, len(end), max(0, nbytes - len(end))) != end:
            raise Damaged(f"no readable {file.name}: its end is missing")
    except OSError as error:
        raise Damaged(f"{file.name} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return read_regular(file, links)


def check_lengths(checkpoint: Checkpoint) -> None:
    """Raise Damaged for the first file that is missing or has another length; of torch's folders if it is shorter."""
    if checkpoint.index is None:
        folders.check_sizes(checkpoint.folder, checkpoint.files())
        return
    for name, file in checkpoint.index.files.items():
        if (nbytes := size_of(checkpoint.folder / name)) != file.nbytes:
            raise Damaged(f"{name} holds {nbytes:,} bytes, {file.nbytes:,} expected")


def verify(checkpoint: Checkpoint, rank: int = 0, ranks: int = 1, progress: Progress = ignore) -> None:
    """Compare the share of a rank of all files with their digests; of torch's folders the sizes.

    Raises:
        Damaged: names the first file that differs.
    """
    check_lengths(checkpoint)
    index = checkpoint.index
    if index is None:
        return
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
        check_parts(checkpoint.folder / name, found, progress)


def check_parts(file: Path, parts: list[Part], progress: Progress = ignore) -> None:
    """Compare parts of a file with their digests. Raises Damaged for the first that differs."""
    descriptor = open_regular(file)
    try:
        in_threads(parts, lambda part: _check_part(descriptor, file, part), progress)
    finally:
        os.close(descriptor)


def _check_part(descriptor: int, file: Path, part: Part) -> int:
    """The bytes of a part, if they are the ones that were saved."""
    buffer = memoryview(
        bytearray(min(1 << 20, part.length))
    )  # small, so that it stays in the processor's cache
    sha256, position, end = hashlib.sha256(), part.start, part.start + part.length
    while position < end:
        count = _read(descriptor, buffer[: min(len(buffer), end - position)], position, file)
        sha256.update(buffer[:count])
        position += count
    if sha256.hexdigest() != part.sha256:
        raise Damaged(
            f"{file.name} is not the file that was saved: the SHA-256 of its bytes {part.start:,} to {end:,} differs"
        )
    return part.length


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


@boards.during(boards.LOAD)
def load_state(
    path: Path,
    state: Mapping[str, Any],
    ranks: Ranks,
    *,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    first: Callable[[NamedTensor], bool] = lambda tensor: False,
    accept: Callable[[dict[str, Any]], None] = lambda values: None,
    weights_only: bool = True,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Read into the tensors of a nested state, in place; return them and the checkpoint's values.

    Every rank must call it. Tensors of the state get their values from any cut and any number of ranks.

    Args:
        path: the checkpoint's folder.
        state: nested dicts and lists. Only its tensors count; its values are not changed.
        check: called with the checkpoint on every rank before anything is read; may raise.
        first: whether a tensor is read before ``accept`` is called.
        accept: called on every rank with what is returned, after the first tensors are read and before others change;
            may raise.
        weights_only: for values in torch's folders, as for ``torch.load``.
        progress: gets the number of bytes as they are compared and read.

    Returns:
        The checkpoint's nested state: its values and the tensors of ``state``, under the keys of the save. From a
        folder by torch's writer only the values below the keys of ``state``.

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
    return read_state(
        checkpoint, state, ranks, first=first, accept=accept, weights_only=weights_only, progress=progress
    )


@boards.during(boards.LOAD)
def read_state(
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    ranks: Ranks,
    *,
    first: Callable[[NamedTensor], bool] = lambda tensor: False,
    accept: Callable[[dict[str, Any]], None] = lambda values: None,
    weights_only: bool = True,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Read a checkpoint that is known to be whole and to have the state's tensors, as :func:`load_state` does.

    Tensors of another dtype get converted values. Every rank must call it.

    Raises:
        Damaged: on every rank, if a file can no longer be read. Some tensors may have changed.
    """
    mine, path = State.of(state), checkpoint.folder
    values: dict[Any, Any] = {}
    stored: dict[str, StoredTensor] = {}
    strides: Strides = {}
    content: dict[str, Any] = {}

    def prepare() -> None:
        if checkpoint.index is not None:
            stored.update(checkpoint.index.tensors)
            values.update({each.path: each.value for each in checkpoint.index.values.values()})
        else:
            assert checkpoint.metadata is not None
            stored.update(
                foreign.tensors_of(path, checkpoint.metadata, mine.tensors, strides, checkpoint.links)
            )
            values.update(
                foreign.values_of(path, checkpoint.metadata, state.keys(), weights_only, checkpoint.links)
            )
        leaves = {stored[name].path: each.tensor for name, each in mine.tensors.items()} | values
        if any(path[:length] in leaves for path in leaves for length in range(1, len(path))):
            raise Damaged("the description has a value inside another value")
        content.update(nested(leaves))

    def read(early: bool) -> None:
        tensors = [each for each in mine.tensors.values() if first(each) == early]
        _read_tensors(path, stored, tensors, strides, progress, checkpoint.links)
        if early:
            accept(content)

    ranks.together(prepare)
    ranks.together(lambda: read(True))
    ranks.together(lambda: read(False))
    return content


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


def _read_tensors(
    folder: Path,
    known: Mapping[str, StoredTensor],
    tensors: list[NamedTensor],
    strides: Strides,
    progress: Progress,
    links: bool,
) -> None:
    """Read every box that this rank needs, in the order of the files."""
    reads: list[tuple[Part, StoredTensor, Box]] = []
    for each in tensors:
        stored = known[each.name]
        for box in each.boxes_to_load():
            reads += [(part, stored, box) for part in stored.parts if meet(part.offsets, part.sizes, box)]
    reads.sort(key=lambda read: (read[0].file, read[0].start))
    wait_for_devices(box.local for _, _, box in reads)
    for name, of_file in itertools.groupby(reads, lambda read: read[0].file):
        _read_boxes(folder / name, list(of_file), strides, progress, links)
    wait_for_devices(box.local for _, _, box in reads)


def _read_boxes(
    file: Path,
    reads: list[tuple[Part, StoredTensor, Box]],
    strides: Strides,
    progress: Progress,
    links: bool,
) -> None:
    def read(each: tuple[Part, StoredTensor, Box]) -> int:
        part, stored, box = each
        with torch.no_grad():
            _read_box(descriptor, file, part, stored.dtype, box, strides.get(part))
        return prod(part.sizes) * stored.dtype.itemsize

    descriptor = open_regular(file, links)
    try:
        in_threads(reads, read, progress)
    finally:
        os.close(descriptor)


def _read_box(
    descriptor: int,
    file: Path,
    part: Part,
    dtype: torch.dtype,
    box: Box,
    layout: tuple[tuple[int, ...], int] | None,
) -> None:
    """Read what the part and the box share. Of the part's first dimension only the rows that are needed are read, or
    all, if the part's elements are not contiguous and have this layout: strides and number."""
    dims = range(len(part.sizes))
    begin = [max(part.offsets[d], box.offsets[d]) for d in dims]
    end = [min(part.offsets[d] + part.sizes[d], box.offsets[d] + box.sizes[d]) for d in dims]
    target = box.local
    for dim in dims:
        target = target.narrow(dim, begin[dim] - box.offsets[dim], end[dim] - begin[dim])
    if layout is not None:
        elements = torch.empty(layout[1], dtype=dtype)
        read_into(descriptor, file, part.data, elements)
        stored = elements.as_strided(part.sizes, layout[0])
        first = 0
    else:
        sizes, skipped, first = list(part.sizes), 0, 1
        if sizes:
            skipped = (begin[0] - part.offsets[0]) * prod(sizes[1:]) * dtype.itemsize
            sizes[0] = end[0] - begin[0]
        if _is_plain_memory(target) and target.dtype == dtype and list(target.shape) == sizes:
            read_into(descriptor, file, part.data + skipped, target)
            torch.autograd.graph.increment_version(target)  # as copy_ does: the engine looks at it
            return
        stored = torch.empty(sizes, dtype=dtype)
        read_into(descriptor, file, part.data + skipped, stored)
    for dim in dims[first:]:
        stored = stored.narrow(dim, begin[dim] - part.offsets[dim], end[dim] - begin[dim])
    target.copy_(stored)


def _is_plain_memory(tensor: Tensor) -> bool:
    """Whether the bytes at its address are its values in their order."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def read_into(descriptor: int, file: Path, position: int, target: Tensor) -> None:
    """Fill a contiguous tensor on the host with the bytes of a file from ``position`` on."""
    if not target.nbytes:
        return
    rest = memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")
    while rest:
        count = _read(descriptor, rest[: 1 << 30], position, file)
        rest, position = rest[count:], position + count


@boards.during(boards.LOAD)
def read_tensors(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], ranks: Ranks, progress: Progress = ignore
) -> None:
    """Read into tensors, by the names of the checkpoint; they have the stored shapes. Every rank must call it.

    Args:
        checkpoint: one that every rank has found whole.
        tensors: with memory on this rank. Values are converted to their dtypes.

    Raises:
        Damaged: a file could be read before and cannot be read now; or a file of torch's writer holds another tensor
            than its ``.metadata`` says, and nothing has changed.
    """
    path, index = checkpoint.folder, checkpoint.index
    paths = {} if index is None else {name: each.path for name, each in index.tensors.items()}
    named = {name: NamedTensor(name, paths.get(name, (name,)), each) for name, each in tensors.items()}
    stored: dict[str, StoredTensor] = {}
    strides: Strides = {}

    def prepare() -> None:
        if index is not None:
            stored.update(index.tensors)
        else:
            assert checkpoint.metadata is not None
            stored.update(foreign.tensors_of(path, checkpoint.metadata, named, strides, checkpoint.links))

    ranks.together(prepare)
    wanted, links = list(named.values()), checkpoint.links
    ranks.together(lambda: _read_tensors(path, stored, wanted, strides, progress, links))
