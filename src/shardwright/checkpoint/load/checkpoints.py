"""A checkpoint that was opened: what it holds, and where its values are. There are two kinds with one interface.

:class:`OwnCheckpoint` is described by ``index.json`` alone. :class:`TorchCheckpoint` is a folder of torch's distributed
checkpoint, described by ``.metadata``, which an unpickler reads that calls nothing. Nothing here communicates.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwright.checkpoint.dcp import entries
from shardwright.checkpoint.dcp.metadata import parse_metadata
from shardwright.checkpoint.format.boxes import Box, overlap
from shardwright.checkpoint.format.index import (
    LARGEST,
    Index,
    Keys,
    StoredTensor,
    TensorForm,
    UnknownVersion,
    parse_index,
)
from shardwright.checkpoint.format.names import INDEX, METADATA
from shardwright.checkpoint.format.nested import StateTensor
from shardwright.checkpoint.load.reading import check_lengths, check_ranges, compared_values, read_box
from shardwright.checkpoint.load.replacement import DescriptionFile, unless_replaced
from shardwright.checkpoint.storage.locations import Location, store_of
from shardwright.checkpoint.storage.stores import Files, Store, UnfinishedSave
from shardwright.checkpoint.storage.threads import Progress, ignore
from shardwright.common.errors import Damaged


@dataclass(frozen=True)
class StoredForm(TensorForm):
    """A tensor of a checkpoint, for users: its name, and the number of parts in which it is stored."""

    name: str
    parts: int


@dataclass(frozen=True)
class Checkpoint(ABC):
    """A checkpoint whose description is sound. Its files may still be damaged: :meth:`verify` compares them.

    Attributes:
        description_file: the file that describes it.
        has_digests: whether bytes can be compared.
        has_pickled_values: whether its values are pickled: then :attr:`values` has their names alone.
        attempt: the identity of the save that wrote it; None in torch's folders.
        version: the version of its format; None for torch's.
        ranks: the number of ranks that have saved it; None in torch's folders.
        about: the versions of libraries that wrote it, and the notes of the save.
    """

    description_file: DescriptionFile
    has_digests: ClassVar[bool]
    has_pickled_values: ClassVar[bool]
    attempt: str | None = field(default=None, kw_only=True)
    version: int | None = field(default=None, kw_only=True)
    ranks: int | None = field(default=None, kw_only=True)
    about: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def place(self) -> Files:
        """The files of the checkpoint; as text the folder or URL."""
        return self.description_file.files

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the description, by which ranks notice that one has read another one."""
        assert self.description_file.fingerprint is not None
        return self.description_file.fingerprint

    @cached_property
    @abstractmethod
    def tensors(self) -> dict[str, StoredForm]:
        """Each tensor by its name."""

    @cached_property
    @abstractmethod
    def keys(self) -> dict[str, Keys]:
        """The keys of each tensor and value in the saved state, by its name."""

    @cached_property
    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Each plain value by its name; None for pickled ones, which :meth:`values_below` reads."""

    @cached_property
    def leaves(self) -> dict[str, Any]:
        """Each tensor and value by its name, with dicts of values opened.

        A dict without tensors is one value in files, and a dict with tensors is not. Here both are alike.
        """
        values = {leaf: each for name, value in self.values.items() for leaf, each in _opened(name, value)}
        return values | self.tensors

    def below(self, name: str) -> dict[str, Any]:
        """Return the leaves below a name, by the rest of their names."""
        start = f"{name}."
        return {
            each.removeprefix(start): leaf for each, leaf in self.leaves.items() if each.startswith(start)
        }

    def has(self, name: str) -> bool:
        """Return whether there is anything of this name, or below it."""
        return name in self.leaves or bool(self.below(name))

    @abstractmethod
    def values_below(self, keys: Container[str], weights_only: bool) -> dict[Keys, Any]:
        """Return the values by their keys: all, or the pickled ones below these first keys. Raises Damaged."""

    @abstractmethod
    def stored_tensors(self, tensors: Mapping[str, StateTensor]) -> Mapping[str, StoredTensor]:
        """These tensors in the files, with at least the chunks that this rank needs.

        Raises:
            Damaged: a file holds another tensor than the description says.
        """

    @abstractmethod
    def position(self, name: str) -> tuple[str, int]:
        """Return the file and the byte where a tensor begins, for reads in the order of the files."""

    @abstractmethod
    def read_whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the values of a tensor, on the host. They are compared with digests first. Raises Damaged."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file apart from the description; of torch's folders the least there can be."""

    @abstractmethod
    def check_lengths(self) -> None:
        """Raise Damaged for the first file that is missing or has another length, in torch's folders a lower one."""

    def verify(self, rank: int = 0, ranks: int = 1, progress: Progress = ignore) -> None:
        """Compare this rank's share of all files with their digests; without digests the lengths.

        Raises:
            Damaged: names the first file that differs.
        """
        self.check_lengths()


def _opened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _opened(f"{name}.{key}", each)
    else:
        yield name, value


@dataclass(frozen=True)
class OwnCheckpoint(Checkpoint):
    """A checkpoint by :func:`save_checkpoint`, in a folder or behind a URL."""

    index: Index
    has_digests = True
    has_pickled_values = False

    @cached_property
    def tensors(self) -> dict[str, StoredForm]:
        return {
            name: StoredForm(each.path, each.dtype, each.shape, name, len(each.chunks))
            for name, each in self.index.tensors.items()
        }

    @cached_property
    def keys(self) -> dict[str, Keys]:
        of_values = {name: each.path for name, each in self.index.values.items()}
        return of_values | {name: each.path for name, each in self.index.tensors.items()}

    @cached_property
    def values(self) -> dict[str, Any]:
        return {name: each.value for name, each in self.index.values.items()}

    def values_below(self, keys: Container[str], weights_only: bool) -> dict[Keys, Any]:
        return {each.path: each.value for each in self.index.values.values()}

    def stored_tensors(self, tensors: Mapping[str, StateTensor]) -> Mapping[str, StoredTensor]:
        return self.index.tensors

    def position(self, name: str) -> tuple[str, int]:
        return min(((each.file, each.start) for each in self.index.tensors[name].chunks), default=("", 0))

    def read_whole(self, name: str, dtype: torch.dtype) -> Tensor:
        stored = self.index.tensors[name]
        whole, origin = torch.empty(stored.shape, dtype=dtype), (0,) * len(stored.shape)
        for chunk in stored.chunks:
            if shared := overlap((chunk.offsets, chunk.sizes), (origin, stored.shape)):
                shared.of(whole, origin).copy_(compared_values(self.place, chunk, stored.dtype))
        return whole

    def sizes(self) -> dict[str, int]:
        return {name: file.nbytes for name, file in self.index.files.items()}

    def check_lengths(self) -> None:
        check_lengths(self.place, self.sizes())

    def verify(self, rank: int = 0, ranks: int = 1, progress: Progress = ignore) -> None:
        super().verify(rank, ranks, progress)
        by_file, files = self.index.chunks_of_files(), self.index.files
        sizes = {name: file.nbytes for name, file in files.items() if not file.has_chunks}
        chunks = {
            f"{name}:{n:09d}": chunk for name, found in by_file.items() for n, chunk in enumerate(found)
        }
        sizes.update({key: chunk.length for key, chunk in chunks.items()})
        of_file: dict[str, list[tuple[int, int, str]]] = {}  # start, end and digest of ranges
        for key in sorted(share(sizes, rank, ranks)):
            if key in chunks:
                of_file.setdefault(chunks[key].file, []).append(chunks[key].range)
            else:
                of_file[key] = [(0, files[key].nbytes, files[key].sha256)]
        for name, ranges in of_file.items():
            check_ranges(self.place, name, ranges, progress)

    def verify_descriptions(self) -> None:
        """Compare the files that hold no chunks of tensors. Raises Damaged for the first that differs."""
        for name, file in self.index.files.items():
            if not file.has_chunks:
                check_ranges(self.place, name, [(0, file.nbytes, file.sha256)])


def share(sizes: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """Return the names for ``rank``, so that all ranks get about the same number of bytes."""
    loads = [0] * ranks
    mine = []
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[name] + 1  # also spread empty files
        if lightest == rank:
            mine.append(name)
    return mine


@dataclass(frozen=True)
class TorchCheckpoint(Checkpoint):
    """A folder of torch's distributed checkpoint."""

    metadata: Metadata
    has_digests = False
    has_pickled_values = True

    @cached_property
    def tensors(self) -> dict[str, StoredForm]:
        return {
            name: StoredForm(
                self.keys[name], entry.properties.dtype, tuple(entry.size), name, len(entry.chunks)
            )
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @cached_property
    def keys(self) -> dict[str, Keys]:
        paths = self.metadata.planner_data or {}
        return {name: paths.get(name) or (name,) for name in self.metadata.state_dict_metadata}

    @cached_property
    def values(self) -> dict[str, Any]:
        return dict.fromkeys(sorted(self.keys.keys() - self.tensors.keys()))

    def values_below(self, keys: Container[str], weights_only: bool) -> dict[Keys, Any]:
        names = [name for name in self.values if self.keys[name][0] in keys]
        values = entries.values_of(self.place, self.metadata, names, weights_only)
        return {self.keys[name]: value for name, value in values.items()}

    def stored_tensors(self, tensors: Mapping[str, StateTensor]) -> Mapping[str, StoredTensor]:
        return entries.tensors_of(self.place, self.metadata, tensors)

    def position(self, name: str) -> tuple[str, int]:
        return entries.position_of(self.metadata, name)

    def read_whole(self, name: str, dtype: torch.dtype) -> Tensor:
        whole = torch.empty(self.tensors[name].shape, dtype=dtype)
        stored = self.stored_tensors({name: StateTensor(name, self.keys[name], whole)})[name]
        box = Box((0,) * whole.dim(), whole)
        for chunk in stored.chunks:
            with closing(self.place.open(chunk.file)) as reader:
                read_box(reader, chunk, stored.dtype, box)
        return whole

    def sizes(self) -> dict[str, int]:
        return entries.sizes_of(self.metadata)

    def check_lengths(self) -> None:
        check_lengths(self.place, self.sizes(), least=True)


# -- opening -----------------------------------------------------------------------------------------------------------


def checkpoint_at(path: Location, *, links: bool = False) -> Checkpoint:
    """Return the checkpoint at a path or URL, whose description is read. Nothing in it is called.

    ``links`` are followed in a local folder.

    Where there is an ``index.json``, it alone is read, whatever ``.metadata`` says. Our files without it are damaged; a
    folder that has only torch's files has no digests.

    Raises:
        FileNotFoundError: there is no folder, or behind a URL no whole checkpoint.
        Damaged: the folder holds no checkpoint, or its description contradicts itself.
        UnknownVersion: its description is of a later version of the format.
        OSError: the store behind a URL does not answer.
    """
    store = store_of(path)
    name = store.description_name()
    if name != METADATA:
        return _own_checkpoint(store, name)
    content, file = _read_description(store.files(links), name, b".")
    return TorchCheckpoint(file, parse_metadata(content))


def check_whole(store: Store) -> None:
    """Raise Damaged unless the files of the checkpoint in a store have their lengths. One of a later version passes."""
    with suppress(UnknownVersion):
        checkpoint_at(store).check_lengths()


def unfinished_checkpoint(save: UnfinishedSave) -> OwnCheckpoint:
    """Return the checkpoint that a save has written, before it is committed. Raises Damaged, OSError."""
    return _own_checkpoint(save, save.stored_name(INDEX))


def _own_checkpoint(files: Files, index_name: str) -> OwnCheckpoint:
    content, file = _read_description(files, index_name, b'"}\n')
    index = parse_index(content)
    return OwnCheckpoint(
        file, index, attempt=index.attempt, version=index.version, ranks=index.ranks, about=index.about
    )


def _read_description(files: Files, name: str, end: bytes) -> tuple[bytes, DescriptionFile]:
    """Return the content of a file that describes a checkpoint.

    Its end is read first: of a file that is cut off or has holes no more is read.
    """
    nbytes = files.size(name)
    file = DescriptionFile.of(files, name)
    with unless_replaced(file):
        if nbytes > LARGEST:
            raise Damaged(f"{name} holds {nbytes:,} bytes, at most {LARGEST:,} are read")
        last = bytearray(min(len(end), nbytes))
        if last:
            with closing(files.open(name)) as reader:
                reader.read_into(memoryview(last), nbytes - len(last))
        if last != end:
            raise Damaged(f"no readable {name}: its end is missing")
        content = files.read(name)
        return content, file._replace(fingerprint=hashlib.sha256(content).hexdigest())
