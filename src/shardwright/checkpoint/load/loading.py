"""Reads a checkpoint into tensors: examined, compared with its digests, and only then read, by all ranks together.

Our own checkpoints are read from ``index.json`` alone. A folder of torch's distributed checkpoint is read through its
``.metadata`` by an unpickler that calls nothing. Then every rank reads what its boxes need. No function here changes a
tensor before every rank has found the checkpoint whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwright import board as boards
from shardwright.checkpoint.dcp import folders, foreign
from shardwright.checkpoint.dcp.foreign import Strides
from shardwright.checkpoint.dcp.metadata import parse_metadata
from shardwright.checkpoint.format.digests import Damaged, share
from shardwright.checkpoint.format.index import LARGEST, METADATA, Index, Part, StoredTensor, parse_index
from shardwright.checkpoint.format.nested import Box, NamedTensor, NestedState, Progress, ignore, meet, nested
from shardwright.checkpoint.load.unreplaced import DescriptionFile, OpenFiles, unless_replaced
from shardwright.checkpoint.storage.places import Location, store_of
from shardwright.checkpoint.storage.stores import Files, LocalFiles, Reader, files_of
from shardwright.checkpoint.storage.threads import in_threads, wait_for_devices
from shardwright.collective import RankGroup


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose description is sound. Its files may still be damaged: :func:`verify` compares them."""

    place: Files
    index: Index | None  #: None of a folder by torch's writer
    metadata: Metadata | None  #: of a folder by torch's writer
    fingerprint: str  #: SHA-256 of the description; ranks that read another one notice
    links: bool = False  #: whether files of torch's writer may be behind links
    origin: DescriptionFile | None = None  #: of the description, to notice that another save has replaced it

    @property
    def folder(self) -> Path:
        """The local folder. Raises ValueError for a checkpoint behind a URL."""
        if self.place.path is None:
            raise ValueError(f"{self.place} is not a local folder; copy the checkpoint to one")
        return self.place.path

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
        """Names of all tensors and values."""
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


def read_description(path: Location, *, links: bool = False) -> Checkpoint:
    """Read what describes a checkpoint. Nothing that it says is called. ``links`` are followed in a local folder.

    Where there is an ``index.json``, it alone is read, whatever ``.metadata`` says. Our files without it are damaged; a
    folder that has only torch's files has no digests.

    Raises:
        FileNotFoundError: there is no folder, or behind a URL no whole checkpoint.
        Damaged: the folder holds no checkpoint, or its description contradicts itself.
        UnknownVersion: its description is of a later version of the format.
        OSError: the store behind a URL does not answer.
    """
    store = store_of(path)
    name = store.description()
    follows = links and name == METADATA  # ours have no links
    described: Files = store if store.path is None else LocalFiles(store.path, follows)
    if name == METADATA:
        data, origin = _description(described, name, b".")
        metadata = parse_metadata(data)
        return Checkpoint(described, None, metadata, hashlib.sha256(data).hexdigest(), links, origin)
    text, origin = _description(described, name, b'"}\n')
    return Checkpoint(store, parse_index(text), None, hashlib.sha256(text).hexdigest(), origin=origin)


def _description(files: Files, name: str, end: bytes) -> tuple[bytes, DescriptionFile]:
    """The content of a file that describes a checkpoint. Its end is read first: of a file that is cut off or has holes
    no more is read."""
    nbytes = files.size(name)
    origin = DescriptionFile.of(files, name)
    with unless_replaced(origin):
        return _content(files, name, nbytes, end), origin


def _content(files: Files, name: str, nbytes: int, end: bytes) -> bytes:
    if nbytes > LARGEST:
        raise Damaged(f"{name} holds {nbytes:,} bytes, at most {LARGEST:,} are read")
    last = bytearray(min(len(end), nbytes))
    if last:
        reader = files.open(name)
        try:
            reader.read_into(memoryview(last), nbytes - len(last))
        finally:
            reader.close()
    if last != end:
        raise Damaged(f"no readable {name}: its end is missing")
    return files.read(name)


def check_lengths(checkpoint: Checkpoint) -> None:
    """Raise Damaged for the first file that is missing or has another length; of torch's folders if it is shorter."""
    if checkpoint.index is None:
        folders.check_sizes(checkpoint.folder, checkpoint.files(), checkpoint.links)
        return
    for name, file in checkpoint.index.files.items():
        if (nbytes := checkpoint.place.size(name)) != file.nbytes:
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
    of_file: dict[str, list[tuple[int, int, str]]] = {}  # start, end and digest of ranges
    for key in sorted(mine):
        if key in parts:
            part = parts[key]
            of_file.setdefault(part.file, []).append((part.start, part.start + part.length, part.sha256))
        else:
            of_file[key] = [(0, index.files[key].nbytes, index.files[key].sha256)]
    for name, ranges in of_file.items():
        _check_ranges(checkpoint.place, name, ranges, progress)


def verify_descriptions(checkpoint: Checkpoint) -> None:
    """Compare the files that hold no parts of tensors with their digests. Raises Damaged for the first that differs."""
    assert checkpoint.index is not None
    for name, file in checkpoint.index.files.items():
        if not file.has_parts:
            _check_ranges(checkpoint.place, name, [(0, file.nbytes, file.sha256)], ignore)


def check_parts(place: Path | Files, name: str, parts: list[Part], progress: Progress = ignore) -> None:
    """Compare parts of a file with their digests. Raises Damaged for the first that differs."""
    ranges = [(part.start, part.start + part.length, part.sha256) for part in parts]
    _check_ranges(files_of(place), name, ranges, progress)


def _check_ranges(files: Files, name: str, ranges: list[tuple[int, int, str]], progress: Progress) -> None:
    reader = files.open(name)
    try:
        in_threads(ranges, lambda each: _check_range(reader, name, *each), progress)
    finally:
        reader.close()


def _check_range(reader: Reader, name: str, start: int, end: int, expected: str) -> int:
    """The length of a range, if its bytes are the ones that were saved."""
    buffer = memoryview(bytearray(min(reader.at_once, end - start)))
    sha256, position = hashlib.sha256(), start
    while position < end:
        count = reader.read_into(buffer[: min(len(buffer), end - position)], position)
        sha256.update(buffer[:count])
        position += count
    if sha256.hexdigest() != expected:
        raise Damaged(
            f"{name} is not the file that was saved: the SHA-256 of its bytes {start:,} to {end:,} differs"
        )
    return end - start


# -- by all ranks ------------------------------------------------------------------------------------------------------


def open_together(
    path: Location, ranks: RankGroup, check: Callable[[Checkpoint], None], progress: Progress = ignore
) -> Checkpoint:
    """A checkpoint that every rank has found whole, and that ``check`` accepts. Every rank must call it.

    Raises:
        FileNotFoundError, Damaged: on every rank, as :func:`read_description` and :func:`verify`; and what ``check``
            raises.
    """
    opened: list[Checkpoint] = []

    def look() -> tuple[str, str]:
        opened.append(read_description(path))
        check(opened[0])
        return opened[0].fingerprint, str(path)

    check_same_description(ranks.run_on_all(look), ranks)
    _compare_shares(opened[0], ranks, progress)
    return opened[0]


def verify_together(checkpoint: Checkpoint, ranks: RankGroup, progress: Progress) -> None:
    """Compare a checkpoint that every rank has opened: that it is the same, and then all files. Raises as above."""
    check_same_description(ranks.all_gather((checkpoint.fingerprint, str(checkpoint.place))), ranks)
    _compare_shares(checkpoint, ranks, progress)


def _compare_shares(checkpoint: Checkpoint, ranks: RankGroup, progress: Progress) -> None:
    def compare() -> None:
        with unless_replaced(checkpoint.origin, checkpoint.fingerprint):
            verify(checkpoint, ranks.rank, ranks.size, progress)

    ranks.run_on_all(compare)


def check_same_description(found: Sequence[tuple[str, str]], ranks: RankGroup) -> None:
    """Compare what the ranks have opened: fingerprint and place of each rank.

    Raises:
        ValueError: two ranks have opened different checkpoints at different places.
        OSError: at the same place.
    """

    def error(others: list[int], *_: str) -> Exception:
        rank, first = others[0], found[0][1]
        if (place := found[rank][1]) != first:
            return ValueError(
                f"rank {rank} loads {place}, and rank 0 {first}, which is another checkpoint. Pass the same path on "
                "every rank"
            )
        return OSError(
            f"{place}: rank {rank} reads another checkpoint there than rank 0. Either another program has just "
            "replaced it: load it again. Or the ranks do not share this file system"
        )

    ranks.check_equal([fingerprint for fingerprint, _ in found], error)


@boards.during(boards.LOAD)
def load_state(
    path: Location,
    state: Mapping[str, Any],
    ranks: RankGroup,
    *,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    first: Callable[[NamedTensor], bool] = lambda tensor: False,
    accept: Callable[[dict[str, Any]], None] = lambda values: None,
    weights_only: bool = True,
    convert: bool = False,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Read into the tensors of a nested state, in place; return them and the checkpoint's values.

    Every rank must call it. Tensors of the state get their values from any cut and any number of ranks.

    Args:
        path: the checkpoint's folder or URL.
        state: nested dicts and lists. Only its tensors count; its values are not changed.
        check: called with the checkpoint on every rank before anything is read; may raise.
        first: whether a tensor is read before ``accept`` is called.
        accept: called on every rank with what is returned, after the first tensors are read and before others change;
            may raise.
        weights_only: for values in torch's folders, as for ``torch.load``.
        convert: tensors may have other dtypes than the stored ones.
        progress: gets the number of bytes as they are compared and read.

    Returns:
        The checkpoint's nested state: its values and the tensors of ``state``, under the keys of the save. From a
        folder by torch's writer only the values below the keys of ``state``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        Damaged: it is not whole. No tensor was changed, unless a file could be read at first and then not again.
        ValueError: a tensor is missing in it, or has another shape or dtype. No tensor was changed.
    """
    mine = NestedState.of(state)

    def fits(checkpoint: Checkpoint) -> None:
        check(checkpoint)
        check_tensors(path, checkpoint, mine.tensors, convert)

    checkpoint = open_together(path, ranks, fits, progress)
    return read_state(
        checkpoint, state, ranks, first=first, accept=accept, weights_only=weights_only, progress=progress
    )


@boards.during(boards.LOAD)
def read_state(
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    ranks: RankGroup,
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
    mine = NestedState.of(state)
    values: dict[Any, Any] = {}
    stored: dict[str, StoredTensor] = {}
    strides: Strides = {}
    content: dict[str, Any] = {}

    def prepare() -> None:
        if checkpoint.index is not None:
            stored.update(checkpoint.index.tensors)
            values.update({each.path: each.value for each in checkpoint.index.values.values()})
        else:
            folder, metadata, links = checkpoint.folder, checkpoint.metadata, checkpoint.links
            assert metadata is not None
            stored.update(foreign.tensors_of(folder, metadata, mine.tensors, strides, links))
            values.update(foreign.values_of(folder, metadata, state.keys(), weights_only, links))
        leaves = {stored[name].path: each.tensor for name, each in mine.tensors.items()} | values
        if any(path[:length] in leaves for path in leaves for length in range(1, len(path))):
            raise Damaged("the description has a value inside another value")
        content.update(nested(leaves))
        files.hold(part.file for part, _, _ in _reads(stored, mine.tensors.values()))

    def read(early: bool) -> None:
        tensors = [each for each in mine.tensors.values() if first(each) == early]
        _read_tensors(files, stored, tensors, strides, progress)
        if early:
            accept(content)

    with closing(OpenFiles(checkpoint.place, checkpoint.origin, checkpoint.fingerprint)) as files:
        ranks.run_on_all(prepare)
        ranks.run_on_all(lambda: read(True))
        ranks.run_on_all(lambda: read(False))
    return content


def check_tensors(
    path: Location, checkpoint: Checkpoint, tensors: Mapping[str, NamedTensor], convert: bool = False
) -> None:
    """Raise ValueError for the first tensor that the checkpoint does not have in this shape and, unless values may be
    converted, in this dtype."""
    stored = checkpoint.shapes()
    for name, each in tensors.items():
        if name not in stored:
            raise ValueError(f"{path} has no tensor {name}, so it is of another model or state")
        dtype, shape = stored[name]
        if shape != each.shape:
            raise ValueError(f"{path}: {name} has shape {list(shape)}, expected {list(each.shape)}")
        if dtype != each.dtype and not convert:
            way = f"Make the model in {dtype}"
            if name.startswith("optimizer."):  # which torch makes in the gradients' dtype
                way = "Use the precision policy of the save (grad_dtype), or load the model alone"
            raise ValueError(f"{path}: {name} has dtype {dtype}, expected {each.dtype}. {way}")


def _reads(
    known: Mapping[str, StoredTensor], tensors: Iterable[NamedTensor]
) -> list[tuple[Part, StoredTensor, Box]]:
    """Parts that this rank needs, in the order of the files."""
    reads: list[tuple[Part, StoredTensor, Box]] = []
    for each in tensors:
        stored = known[each.name]
        for box in each.boxes_to_load():
            reads += [(part, stored, box) for part in stored.parts if meet(part.offsets, part.sizes, box)]
    reads.sort(key=lambda read: (read[0].file, read[0].start))
    return reads


def _read_tensors(
    files: OpenFiles,
    known: Mapping[str, StoredTensor],
    tensors: list[NamedTensor],
    strides: Strides,
    progress: Progress,
) -> None:
    """Read every box that this rank needs."""
    reads = _reads(known, tensors)
    wait_for_devices(box.local for _, _, box in reads)
    for name, of_file in itertools.groupby(reads, lambda read: read[0].file):
        with files.reader(name) as reader:
            _read_boxes(reader, list(of_file), strides, progress)
    wait_for_devices(box.local for _, _, box in reads)


def _read_boxes(
    reader: Reader, reads: list[tuple[Part, StoredTensor, Box]], strides: Strides, progress: Progress
) -> None:
    def read(each: tuple[Part, StoredTensor, Box]) -> int:
        part, stored, box = each
        with torch.no_grad():
            _read_box(reader, part, stored.dtype, box, strides.get(part))
        return prod(part.sizes) * stored.dtype.itemsize

    in_threads(reads, read, progress)


def _read_box(
    reader: Reader, part: Part, dtype: torch.dtype, box: Box, layout: tuple[tuple[int, ...], int] | None
) -> None:
    """Read what the part and the box share. Only the rows of the first dimension that are needed are read, or
    all, if the part's elements are not contiguous and have this layout: strides and number."""
    dims = range(len(part.sizes))
    begin = [max(part.offsets[d], box.offsets[d]) for d in dims]
    end = [min(part.offsets[d] + part.sizes[d], box.offsets[d] + box.sizes[d]) for d in dims]
    target = box.local
    for dim in dims:
        target = target.narrow(dim, begin[dim] - box.offsets[dim], end[dim] - begin[dim])
    if layout is not None:
        elements = torch.empty(layout[1], dtype=dtype)
        fill(elements, reader, part.data)
        stored = elements.as_strided(part.sizes, layout[0])
        first = 0
    else:
        sizes, skipped, first = list(part.sizes), 0, 1
        if sizes:
            skipped = (begin[0] - part.offsets[0]) * prod(sizes[1:]) * dtype.itemsize
            sizes[0] = end[0] - begin[0]
        if _is_plain_memory(target) and target.dtype == dtype and list(target.shape) == sizes:
            fill(target, reader, part.data + skipped)
            torch.autograd.graph.increment_version(target)  # as copy_ does: the engine looks at it
            return
        stored = torch.empty(sizes, dtype=dtype)
        fill(stored, reader, part.data + skipped)
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


def fill(target: Tensor, reader: Reader, position: int) -> None:
    """Fill a contiguous tensor on the host with the bytes of a file from ``position`` on."""
    if not target.nbytes:
        return
    rest = memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")
    while rest:
        count = reader.read_into(rest[: 1 << 30], position)
        rest, position = rest[count:], position + count


@boards.during(boards.LOAD)
def read_tensors(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], ranks: RankGroup, progress: Progress = ignore
) -> None:
    """Read into tensors, by the names of the checkpoint; they have the stored shapes. Every rank must call it.

    Args:
        checkpoint: one that every rank has found whole.
        tensors: with memory on this rank. Values are converted to their dtypes.

    Raises:
        Damaged: a file could be read before and cannot be read now; or a file of torch's writer holds another tensor
            than its ``.metadata`` says, and nothing has changed.
        ValueError: the checkpoint has no tensor of a name, or one of another shape.
    """
    index = checkpoint.index
    paths = {} if index is None else {name: each.path for name, each in index.tensors.items()}
    named = {name: NamedTensor(name, paths.get(name, (name,)), each) for name, each in tensors.items()}
    stored: dict[str, StoredTensor] = {}
    strides: Strides = {}

    def prepare() -> None:
        if index is not None:
            stored.update(index.tensors)
        else:
            folder, metadata = checkpoint.folder, checkpoint.metadata
            assert metadata is not None
            stored.update(foreign.tensors_of(folder, metadata, named, strides, checkpoint.links))

        for each in named.values():
            if each.name not in stored:
                raise ValueError(
                    f"{checkpoint.origin}: expected a tensor {each.name}, found none of this name"
                )
            if each.shape != (shape := tuple(stored[each.name].shape)):
                raise ValueError(
                    f"{checkpoint.origin}: expected a tensor of the stored shape {list(shape)} for {each.name}, found "
                    f"one of shape {list(each.shape)}"
                )
        files.hold(part.file for part, _, _ in _reads(stored, named.values()))

    wanted = list(named.values())
    with closing(OpenFiles(checkpoint.place, checkpoint.origin, checkpoint.fingerprint)) as files:
        ranks.run_on_all(prepare)
        ranks.run_on_all(lambda: _read_tensors(files, stored, wanted, strides, progress))
