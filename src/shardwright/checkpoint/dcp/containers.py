"""Reads the containers of torch's writer, zip files of one tensor or value each, without calling what they name.

Only the description of a tensor is read here: dtype, shape and the place of its bytes. Records that are compressed or
reach beyond their container raise an error, so no short file asks for much memory.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch

from shardwright.checkpoint.dcp.opcodes import check_operations, name_of_callable, not_plain
from shardwright.checkpoint.format.archive import zipped
from shardwright.checkpoint.format.values import DTYPES
from shardwright.checkpoint.storage.stores import Reader
from shardwright.common.errors import Damaged

LARGEST_DIRECTORY = 1 << 20  #: bytes of the list of records
LARGEST_PICKLE = 1 << 26  #: bytes of a pickled value
_END, _END64, _LOCATOR = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip


class Container(NamedTuple):
    """A range of an open file."""

    reader: Reader
    file: str  #: its name
    start: int
    length: int

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.length:
            raise Damaged(f"{self.file} has a record outside its container at byte {self.start:,}")
        data, position = bytearray(length), 0
        while position < length:
            position += self.reader.read_into(memoryview(data)[position:], self.start + offset + position)
        return bytes(data)


class ContainedTensor(NamedTuple):
    """A tensor in a container of torch's writer: its elements begin at byte ``data`` of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    data: int
    elements: int  #: in the file from ``data`` on


def describe(container: Container, name: str) -> ContainedTensor:
    """Return the tensor that a container holds.

    Raises:
        Damaged: it holds anything else.
    """
    records = _records(container)
    try:
        return _described(container, records)
    except Damaged as problem:
        raise Damaged(f"{name!r}: {problem}") from None
    except Exception as error:  # damaged bytes can raise nearly any exception
        raise Damaged(f"{name!r} in {container.file} is no tensor ({type(error).__name__})") from None


def value_of(container: Container, name: str) -> Any:
    """Return the plain value that a container holds, read as ``torch.load(weights_only=True)`` does.

    Raises:
        Damaged: it is damaged, or no plain value.
    """
    records = _records(container)
    contents = {key: container.read(*place) for key, place in records.items()}
    names = check_operations(_pickle_of(contents, container), f"{name!r}")
    if "builtins bytearray" in names or "__builtin__ bytearray" in names:  # of any length, by a number
        raise Damaged(f"{name!r} names bytearray, which is not a tensor or plain value; it was not called")
    # Packed again, so that torch's reader sees the records that were examined here, and no others.
    stream = io.BytesIO(zipped({f"archive/{key}": data for key, data in contents.items()}))
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Damaged(f"{name!r} {not_plain(error)}") from None
    except Exception as error:  # damaged bytes can raise nearly any exception
        raise Damaged(f"{name!r} is damaged: torch.load cannot read it ({type(error).__name__})") from None


def _pickle_of(contents: Mapping[str, bytes], container: Container) -> bytes:
    if "data.pkl" not in contents or len(contents["data.pkl"]) > LARGEST_PICKLE:
        raise Damaged(f"{container.file} has no readable container at byte {container.start:,}")
    return contents["data.pkl"]


# -- zip files ---------------------------------------------------------------------------------------------------------


def _records(container: Container) -> dict[str, tuple[int, int]]:
    """Offset and length of each record, by its name without the folder's."""
    try:
        entries = _entries(container)
    except (struct.error, UnicodeDecodeError, IndexError):
        entries = {}
    if not entries:
        raise Damaged(f"{container.file} has no readable container at byte {container.start:,}")
    return entries


def _entries(container: Container) -> dict[str, tuple[int, int]]:
    size = min(container.length, 22 + (1 << 16))
    tail = container.read(container.length - size, size)
    end = tail.rfind(_END)
    if end < 0:
        return {}
    _, count, length, begin, _ = struct.unpack_from("<HHIIH", tail, end + 8)
    if end >= 20 and tail[end - 20 : end - 16] == _LOCATOR:
        (place,) = struct.unpack_from("<Q", tail, end - 12)
        record = container.read(place, 56)
        if record[:4] != _END64:
            return {}
        count, length, begin = struct.unpack_from("<QQQ", record, 32)
    if length > LARGEST_DIRECTORY:
        return {}
    directory, position = container.read(begin, length), 0
    entries: dict[str, tuple[int, int]] = {}
    for _ in range(count):
        if directory[position : position + 4] != b"PK\1\2":
            return {}
        flags, method = struct.unpack_from("<HH", directory, position + 8)
        packed, nbytes, name, extra, comment = struct.unpack_from("<IIHHH", directory, position + 20)
        (local,) = struct.unpack_from("<I", directory, position + 42)
        text = directory[position + 46 : position + 46 + name].decode()
        more = directory[position + 46 + name : position + 46 + name + extra]
        nbytes, packed, local = _wide(more, nbytes, packed, local)
        if method or flags & 1 or packed != nbytes:
            raise Damaged(
                f"{container.file} has the compressed record {text!r}; torch's writer compresses none"
            )
        header = container.read(local, 30)
        inner = sum(struct.unpack_from("<HH", header, 26))
        key = text.partition("/")[2]
        if header[:4] != b"PK\3\4" or key in entries or local + 30 + inner + nbytes > container.length:
            return {}
        entries[key] = (local + 30 + inner, nbytes)
        position += 46 + name + extra + comment
    return entries


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """Return the numbers of a record; those that do not fit into 32 bits are in the extra field."""
    position, wide = 0, b""
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            wide = extra[position + 4 : position + 4 + length]
        position += 4 + length
    result = []
    for value in values:
        if value == 0xFFFFFFFF and len(wide) >= 8:
            value, wide = struct.unpack_from("<Q", wide)[0], wide[8:]
        result.append(value)
    return tuple(result)


# -- the pickle of a tensor --------------------------------------------------------------------------------------------


class _NotedCall(NamedTuple):
    name: str
    arguments: tuple[Any, ...]


class _CallUnpickler(pickle.Unpickler):
    """Notes which functions would be called with which arguments, and calls none."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and f"torch.{name}" in DTYPES:
            return DTYPES[f"torch.{name}"]
        if name in _STORAGES or name == "UntypedStorage":
            return name
        if (module, name) == ("collections", "OrderedDict") or (module, name) in _REBUILDS:
            return _NotedFunction(name)
        raise Damaged(f"names {name_of_callable(module, name)}, which no tensor needs; it was not called")

    def persistent_load(self, identity: Any) -> Any:
        return _NotedCall("storage", identity)


class _NotedFunction:
    """A function's name. To call it gives a note of the call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any) -> _NotedCall:
        return _NotedCall(self._name, arguments)

    def __setstate__(self, state: Any) -> NoReturn:
        raise Damaged("gives a function a state")


_REBUILDS = {("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")}


def _described(container: Container, records: Mapping[str, tuple[int, int]]) -> ContainedTensor:
    offset, nbytes = records["data.pkl"]
    if nbytes > 1 << 16 or "data/0" not in records:
        raise Damaged(f"{container.file} has no tensor in the container at byte {container.start:,}")
    if "byteorder" in records and container.read(*records["byteorder"]) != b"little":
        raise Damaged("its bytes are in the other order")
    data = container.read(offset, nbytes)
    check_operations(data, "its description")
    call = _CallUnpickler(io.BytesIO(data)).load()
    if type(call) is not _NotedCall or not call.name.startswith("_rebuild_tensor"):
        raise Damaged("is no tensor")
    storage, first, shape, strides, _, hooks, *more = call.arguments
    _, kind, _, _, count = storage.arguments
    dtype = _STORAGES.get(kind, more[0] if more else None)
    if (
        hooks != _NotedCall("OrderedDict", ())
        or type(dtype) is not torch.dtype
        or len(more) > (kind not in _STORAGES)
    ):
        raise Damaged("is a tensor of a kind that is not supported")
    numbers = (first, count, *shape, *strides)
    if len(shape) != len(strides) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise Damaged("has no readable shape")
    start, available = records["data/0"]
    last = (
        sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if prod(shape) else -1
    )
    if (first + last + 1) * dtype.itemsize > available:
        raise Damaged("has elements outside its bytes")
    begin = container.start + start + first * dtype.itemsize
    return ContainedTensor(dtype, tuple(shape), tuple(strides), begin, last + 1)
