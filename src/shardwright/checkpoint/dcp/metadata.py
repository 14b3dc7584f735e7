"""The ``.metadata`` file of torch's distributed checkpoint, read without running anything that the file says.

torch writes this file with pickle, and unpickling calls whatever the file names. Here an unpickler knows the few names
that torch writes, and gives an inert record for each of them. The records are checked against those that a save can
have written, and only then torch's own objects are built. Any other content raises :class:`Damaged`.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwright.checkpoint.dcp.opcodes import check_operations, name_of_callable
from shardwright.checkpoint.format.boxes import check_coverage
from shardwright.checkpoint.format.values import DTYPES, count_of, typed
from shardwright.common.errors import Damaged

MOST_DIMS = 64
BYTES_OF_CHUNK = (
    8  #: that any chunk takes in the file; a file of fewer names the same list of chunks again and again
)


@dataclass(frozen=True)
class FileRange:
    """The place of one item's bytes: a file of the folder, and a range of it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def parse_metadata(data: bytes) -> Metadata:
    """Return the content of a ``.metadata`` file, its ``storage_data`` as :class:`FileRange`.

    Raises:
        Damaged: the bytes are no such file, name a class or function that none has, or contradict themselves.
    """
    check_operations(data, ".metadata")
    try:
        read = _RecordUnpickler(io.BytesIO(data)).load()
    except Damaged:
        raise
    except Exception as error:  # damaged bytes can raise nearly any exception
        raise Damaged(f"unreadable .metadata file ({type(error).__name__})") from error
    try:
        _check_number(read, len(data))
        return _built(read)
    except Damaged as error:
        raise Damaged(f"unreadable .metadata file: {error!s:.500}") from None
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
        raise Damaged(f"unreadable .metadata file ({type(error).__name__}: {error!s:.500})") from error


# -- unpickling --------------------------------------------------------------------------------------------------------


class _ObjectRecord:
    """The file's description of one object: the name of its class, arguments and state. Nothing is called with them."""

    __slots__ = ("state",)
    state: Any

    def __new__(cls, *arguments: Any) -> _ObjectRecord:
        self = object.__new__(cls)
        self.state = arguments
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA = "torch.distributed.checkpoint.metadata"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")

#: Every class and function that torch's writer pickles, dtypes apart: its module and name -> ours for it.
_CLASS_NAMES: dict[tuple[str, str], str] = {
    **{
        (_METADATA, name): name
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): "_StorageInfo",
    ("torch", "Size"): "Size",
    ("torch.serialization", "_get_layout"): "layout",
    **{(module, name): "path" for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


class _RecordUnpickler(pickle.Unpickler):
    """Makes a record for each name of the list. Other names raise an error."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        # Separate classes for each file, so that one file cannot change the classes of the next.
        self._classes: dict[str, type] = {
            name: type(name, (_ObjectRecord,), {"__slots__": ()}) for name in _CLASS_NAMES.values()
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASS_NAMES:
            return self._classes[_CLASS_NAMES[module, name]]
        if module == "torch" and f"torch.{name}" in DTYPES:
            return f"torch.{name}"  # a string: there is nothing that a file could call or change
        raise Damaged(
            f".metadata names {name_of_callable(module, name)}, which no checkpoint uses; it was not called"
        )

    def persistent_load(self, number: Any) -> NoReturn:
        raise Damaged(".metadata refers to objects outside it, which no checkpoint does")


# -- checking and building ---------------------------------------------------------------------------------------------


def _state(value: Any, kind: str) -> Any:
    if not isinstance(value, _ObjectRecord) or type(value).__name__ != kind:
        raise Damaged(f"expected a {kind}, found {_kind(value)}")
    return value.state


def _fields(value: Any, kind: str) -> dict[str, Any]:
    state = _state(value, kind)
    return typed(state, dict, f"the fields of {kind}") if state else {}  # of no fields there is no state


def _kind(value: Any) -> str:
    return type(value).__name__


def _size(value: Any) -> torch.Size:
    (numbers,) = _state(value, "Size")
    if len(typed(numbers, tuple, "sizes")) > MOST_DIMS:
        raise Damaged(f"expected at most {MOST_DIMS} dimensions, found {len(numbers):,}")
    return torch.Size([count_of(each, "a size") for each in typed(numbers, tuple, "sizes")])


def _check_number(read: Any, nbytes: int) -> None:
    """Check that the file describes no more chunks than it has room for."""
    entries = typed(_fields(read, "Metadata")["state_dict_metadata"], dict, "the list of values")
    chunks = 0
    for entry in entries.values():
        if _kind(entry) == "TensorStorageMetadata":
            chunks += len(typed(_fields(entry, "TensorStorageMetadata")["chunks"], list, "chunks"))
    if chunks * BYTES_OF_CHUNK > nbytes:
        raise Damaged(f"{chunks:,} parts of tensors do not fit into {nbytes:,} bytes")


def _built(read: Any) -> Metadata:
    fields = _fields(read, "Metadata")
    entries = {
        typed(name, str, "a name"): _entry(name, entry)
        for name, entry in typed(fields["state_dict_metadata"], dict, "the list of values").items()
    }
    places: dict[MetadataIndex, FileRange] = {}
    for index, info in typed(fields["storage_data"], dict, "the list of places").items():
        places[_index(index)] = _place(info)
    _check_places(entries, places)
    version = fields.get("version")
    return Metadata(
        state_dict_metadata=entries,
        planner_data=_paths(fields.get("planner_data")),
        storage_data=places,
        storage_meta=StorageMeta(),
        version=None if version is None else typed(version, str, "the version"),
    )


def _entry(name: str, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _kind(value) == "BytesStorageMetadata":
        _fields(value, "BytesStorageMetadata")
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    dtype = DTYPES[typed(_state(fields["properties"], "TensorProperties")[0], str, "a dtype")]
    size = _size(fields["size"])
    chunks = [
        ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"]))
        for chunk in (
            _fields(each, "ChunkStorageMetadata") for each in typed(fields["chunks"], list, "chunks")
        )
    ]
    # torch's loader does not check; values of missing chunks stay what they were.
    check_coverage(name, size, [(chunk.offsets, chunk.sizes) for chunk in chunks])
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        typed(fields["fqn"], str, "a name"),
        None if offset is None else _size(offset),
        None if index is None else count_of(index, "an index"),
    )


def _place(value: Any) -> FileRange:
    fields = _fields(value, "_StorageInfo")
    name = typed(fields["relative_path"], str, "a file's name")
    if name in ("", ".", "..") or name != PurePosixPath(name).name or "\0" in name or "\\" in name:
        raise Damaged(f"expected the name of a file in the checkpoint, found {name!r}")
    if fields.get("transform_descriptors"):
        raise Damaged(f"{name} was written with extensions of torch's writer, which are not supported")
    return FileRange(name, count_of(fields["offset"], "an offset"), count_of(fields["length"], "a length"))


def _check_places(entries: dict[str, Any], places: dict[MetadataIndex, FileRange]) -> None:
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            indices = [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
        else:
            indices = [MetadataIndex(name)]
        if any(index not in places for index in indices):
            raise Damaged(f"{name!r} has a part that is not in any file")


def _paths(value: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Return the place of each value in the nested state: keys of dicts and numbers of lists."""
    if value is None:
        return None
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, path in typed(value, dict, "the list of keys").items():
        if any(type(step) not in (str, int) for step in typed(path, tuple, "keys")):
            raise Damaged("the list of keys has a key that is neither a name nor a number")
        paths[typed(name, str, "a name")] = path
    return paths
