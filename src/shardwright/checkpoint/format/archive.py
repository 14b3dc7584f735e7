"""The container in which ``torch.save`` stores one tensor, built around bytes that are written as they are.

torch's distributed checkpoint reads each part of a tensor as such a container: a zip file with a pickle that describes
the tensor, and its bytes. The bytes here depend on the tensor alone, so equal tensors give equal files.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.engine.compat import storage_class

#: The tensor's bytes begin at a multiple of it, and the container's length is one.
ALIGNMENT = 64
LARGEST = (1 << 32) - (1 << 16)  #: bytes of a tensor in one container; beyond it zip files have another form
_STAMP = (0, 33)  #: time and date of all records: 1980-01-01


def container(dtype: torch.dtype, shape: Sequence[int], data: memoryview) -> tuple[bytes, bytes]:
    """Return the bytes before and after the bytes ``data`` of a contiguous tensor in its container.

    Raises:
        ValueError: the tensor has more than :data:`LARGEST` bytes.
    """
    return _around(dtype, tuple(shape), len(data), zlib.crc32(data))


def lengths(dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of what stands before and after a tensor of this dtype and shape. Raises ValueError as above."""
    head, tail = _around(dtype, tuple(shape), prod(shape) * dtype.itemsize, 0)
    return len(head), len(tail)


def _around(dtype: torch.dtype, shape: tuple[int, ...], nbytes: int, crc32: int) -> tuple[bytes, bytes]:
    if nbytes > LARGEST:
        raise ValueError(f"a part of a tensor holds {nbytes:,} bytes, at most {LARGEST:,} can be written")
    whole = _Zip()
    for name, data in (("data.pkl", _pickled(dtype, shape)), ("byteorder", b"little"), ("version", b"3\n")):
        whole.add(f"archive/{name}", len(data), zlib.crc32(data))
        whole.head += data
    whole.add("archive/data/0", nbytes, crc32, ALIGNMENT)
    return bytes(whole.head), whole.directory(nbytes)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host. The tensor must live as long as they are used."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def host_bytes(tensor: Tensor) -> tuple[memoryview, Tensor]:
    """Return the bytes of a tensor in its order, and what owns them on the host: a copy if the tensor is not
    contiguous."""
    held = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memory_of(held), held


def zipped(records: Mapping[str, bytes]) -> bytes:
    """Return a zip file of these records, without compression."""
    whole = _Zip()
    for name, data in records.items():
        whole.add(name, len(data), zlib.crc32(data))
        whole.head += data
    return bytes(whole.head) + whole.directory(0)


class _Zip:
    """Records of a zip file without compression. Their data is for the caller to put after each."""

    def __init__(self) -> None:
        self.head = bytearray()
        self._entries = bytearray()
        self._count = 0

    def add(self, name: str, nbytes: int, crc32: int, alignment: int = 1) -> None:
        start, encoded = len(self.head), name.encode()
        begin = start + 30 + len(encoded)
        extra = b""
        if begin % alignment:
            filler = -(begin + 4) % alignment
            extra = struct.pack("<HH", 0x4246, filler) + b"Z" * filler  # as torch pads
        fields = struct.pack(
            "<HHHHHIIIHH", 20, 0, 0, *_STAMP, crc32, nbytes, nbytes, len(encoded), len(extra)
        )
        self.head += b"PK\3\4" + fields + encoded + extra
        without_extra = fields[:-2] + struct.pack("<HHHHII", 0, 0, 0, 0, 0, start)
        self._entries += b"PK\1\2" + struct.pack("<H", 20) + without_extra + encoded
        self._count += 1

    def directory(self, nbytes: int) -> bytes:
        """Return the bytes after the last record, whose data has ``nbytes`` bytes."""
        count, size, begin = self._count, len(self._entries), len(self.head) + nbytes
        comment = bytes(-(begin + size + 22) % ALIGNMENT)
        end = struct.pack("<HHHHIIH", 0, 0, count, count, size, begin, len(comment))
        return bytes(self._entries) + b"PK\5\6" + end + comment


class _RebuildCall:
    """Pickled as the call that ``torch.save`` writes for a tensor."""

    def __init__(self, call: tuple[Any, ...]) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, _Storage) else None


class _Storage:
    def __init__(self, identity: tuple[Any, ...]) -> None:
        self.identity = identity


@functools.lru_cache(256)
def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of a contiguous tensor on the host: what torch makes of an empty one, with this shape."""
    return pickled(described(dtype, shape, "0"))


def pickled(state: Any) -> bytes:
    """Return the pickle of a nested state whose tensors are :func:`described`."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(state)
    return stream.getvalue()


def described(dtype: torch.dtype, shape: Sequence[int], record: str) -> Any:
    """Pickled as a contiguous tensor on the host whose bytes are the record ``data/RECORD`` of the file."""
    rebuild, (storage, *_, hooks), *_ = _of_empty(dtype)
    count = prod(shape)
    kind: type = torch.UntypedStorage
    more: tuple[torch.dtype, ...] = ()
    if isinstance(storage, torch.UntypedStorage):
        count, more = count * dtype.itemsize, (dtype,)
    else:
        kind = storage_class(storage)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    held = _Storage(("storage", kind, record, "cpu", count))
    return _RebuildCall((rebuild, (held, 0, tuple(shape), tuple(strides), False, hooks, *more)))


def _of_empty(dtype: torch.dtype) -> tuple[Any, ...]:
    rebuild, arguments = torch.empty(0, dtype=dtype).__reduce_ex__(2)
    return rebuild, (arguments[0], OrderedDict())
