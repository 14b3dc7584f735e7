"""Ways of buckets of weights to their readers: this process, other ranks of a group, processes of the same host.

The sending side is a :class:`BucketSink`. A bucket begins with a header (JSON: keys, dtypes, shapes).
Nothing is unpickled. Shared memory is an anonymous file (``memfd``), whose descriptor travels over a Unix socket in
Linux's abstract namespace. Neither has a name in a file system, so nothing is left when processes are killed. This file
knows no models.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.pretrained.files import SAFETENSORS_DTYPES, dtype_name
from shardwright.engine.comm import noted

ALIGNMENT = 64  #: bytes, of each tensor in shared memory
_LENGTH = struct.Struct("<Q")
_READY = b"\x01"


@dataclass(frozen=True)
class Header:
    """The first message of a bucket, or the end of a stream.

    Attributes:
        number: of the bucket, from 0; at the end the number of all buckets.
        count: buckets of the stream.
        tensors: key, dtype and shape of each tensor, in their order.
        stopped: why the sender stopped early; empty: it did not.
    """

    number: int
    count: int
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...] = ()
    stopped: str = ""

    @property
    def is_end(self) -> bool:
        return self.number == self.count and not self.stopped

    def to_bytes(self) -> bytes:
        tensors = [[key, dtype_name(dtype, key), list(shape)] for key, dtype, shape in self.tensors]
        return json.dumps([self.number, self.count, tensors, self.stopped]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        number, count, tensors, stopped = json.loads(data)
        own = tuple((key, SAFETENSORS_DTYPES[dtype], tuple(shape)) for key, dtype, shape in tensors)
        return cls(number, count, own, stopped)

    def places(self) -> tuple[list[int], int]:
        """Return the first byte of each tensor in shared memory, and the bytes of all of them."""
        starts, end = [], 0
        for _, dtype, shape in self.tensors:
            starts.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return starts, end


class BucketSink:
    """The place of one rank's buckets. This class itself is for a rank whose caller gets no tensors."""

    def begin(self, header: Header) -> None:
        """Start a bucket."""

    def put(self, key: str, tensor: Tensor) -> None:
        """Add the bucket's next tensor, in the order of the header."""

    def end(self) -> dict[str, Tensor]:
        """Finish the bucket, and return what this rank's caller gets."""
        return {}

    def close(self, header: Header) -> None:
        """End the stream, early or not."""


class Here(BucketSink):
    """Tensors for the caller of this rank."""

    def begin(self, header: Header) -> None:
        self._bucket: dict[str, Tensor] = {}

    def put(self, key: str, tensor: Tensor) -> None:
        self._bucket[key] = tensor

    def end(self) -> dict[str, Tensor]:
        bucket, self._bucket = self._bucket, {}
        return bucket

    def close(self, header: Header) -> None:
        self._bucket = {}


# -- another process group ---------------------------------------------------------------------------------------------


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which a group communicates."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class ToGroup(BucketSink):
    """Broadcasts from this rank to the others of a group, tensor by tensor."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._device = device_of(group)
        self._rest: list[tuple[str, torch.dtype, tuple[int, ...]]] = []  #: of a bucket that has begun
        self._open = False

    def begin(self, header: Header) -> None:
        data = header.to_bytes()
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._rest, self._open = list(header.tensors), bool(header.tensors)

    def put(self, key: str, tensor: Tensor) -> None:
        self._broadcast(tensor)
        del self._rest[0]

    def end(self) -> dict[str, Tensor]:
        self._finish(complete=True)
        return {}

    def close(self, header: Header) -> None:
        if self._open:
            for _, dtype, shape in self._rest:  # the others wait for them
                self._broadcast(torch.zeros(shape, dtype=dtype))
            self._finish(complete=False)
        self.begin(header)

    def _finish(self, complete: bool) -> None:
        self._broadcast(torch.tensor([complete], dtype=torch.uint8))
        self._rest, self._open = [], False

    def _broadcast(self, tensor: Tensor) -> None:
        if tensor.numel():
            data = tensor.to(self._device).contiguous().view(-1).view(torch.uint8)
            with noted("broadcast of weights", self._group):
                dist.broadcast(data, group=self._group, group_src=dist.get_rank(self._group))


class FromGroup:
    """Receives what :class:`ToGroup` of another rank broadcasts."""

    def __init__(self, group: dist.ProcessGroup, source: int) -> None:
        self._group, self._source = group, source
        self._device = device_of(group)

    def header(self) -> Header:
        length = int(self._receive((1,), torch.int64).item())
        return Header.from_bytes(bytes(self._receive((length,), torch.uint8).tolist()))

    def bucket(self, header: Header) -> dict[str, Tensor]:
        tensors = {key: self._receive(shape, dtype) for key, dtype, shape in header.tensors}
        return tensors if self._is_complete() else {}

    def skip(self, header: Header) -> None:
        for _, dtype, shape in header.tensors:
            self._receive(shape, dtype)
        self._is_complete()

    def done(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _is_complete(self) -> bool:
        return bool(self._receive((1,), torch.uint8).item())

    def _receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if tensor.numel():
            with noted("broadcast of weights", self._group):
                dist.broadcast(tensor.view(-1).view(torch.uint8), group=self._group, group_src=self._source)
        return tensor


# -- shared memory -----------------------------------------------------------------------------------------------------


def _address(name: str) -> str:
    """Return an address in the abstract namespace: it exists as long as the socket, and has no file."""
    if not sys.platform.startswith("linux"):
        raise NotImplementedError(
            f"shared memory needs Linux's anonymous files; this is {sys.platform}. Pass a process group instead."
        )
    if not name or len(name.encode()) > 80:
        raise ValueError(f"the name of shared weights must have 1 to 80 bytes, got {name!r}")
    return f"\0shardwright-weights-{os.getuid()}/{name}"


def _refuse_other_users(connection: socket.socket) -> None:
    """Close and raise if the process at the other end has another user: any user can open an abstract address."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user, own = struct.unpack("3i", found)[1], os.getuid()
    if user != own:
        connection.close()
        raise PermissionError(f"expected a process of user {own} at the other end, found user {user}")


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Turn the error of a broken connection into one that says what it means."""
    try:
        yield
    except ConnectionError as error:
        raise ConnectionError("the process at the other end has ended") from error


class ToSharedMemory(BucketSink):
    """Copies buckets into shared memory, for processes of this host that open it by its name.

    A bucket has memory of its own. Its size in memory ends when every process that has it has dropped it or ended.

    Args:
        name: for :class:`FromSharedMemory`.
        readers: processes to wait for before the first bucket.
        timeout: seconds to wait for a reader, at the start and after each bucket.
    """

    def __init__(self, name: str, readers: int, timeout: float) -> None:
        if readers < 1:
            raise ValueError(f"consumers must be at least 1, got {readers}")
        self._name, self._count, self._timeout = name, readers, timeout
        self._readers: list[socket.socket] = []
        self._descriptor, self._memory = -1, torch.empty(0, dtype=torch.uint8)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(_address(name))
        except OSError as error:
            self._listener.close()
            raise OSError(
                f"shared weights {name!r}: another process sends under this name ({error})"
            ) from error
        self._listener.listen(readers)

    def begin(self, header: Header) -> None:
        self._meet()
        self._header = header
        self._starts, nbytes = header.places()
        self._next = 0
        self._descriptor = os.memfd_create("shardwright-weights", os.MFD_CLOEXEC)
        if nbytes:
            os.posix_fallocate(self._descriptor, 0, nbytes)  # without this a full memory kills with SIGBUS
            self._memory = torch.frombuffer(mmap.mmap(self._descriptor, nbytes), dtype=torch.uint8)

    def put(self, key: str, tensor: Tensor) -> None:
        start = self._starts[self._next]
        self._next += 1
        if tensor.numel():
            target = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)

    def end(self) -> dict[str, Tensor]:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._send(self._header, [self._descriptor])
        self._drop()
        for reader in self._readers:  # when they have used it, its memory is free
            try:
                with _connected():
                    _receive_exactly(reader, 1)
            except OSError as error:
                raise RuntimeError(
                    f"shared weights {self._name!r}: a consumer did not finish bucket {self._header.number} of "
                    f"{self._header.count}: {error}"
                ) from error
        return {}

    def close(self, header: Header) -> None:
        try:
            if header.is_end:
                self._meet()
            self._send(header, [])
        finally:
            self._drop()
            self._memory = torch.empty(0, dtype=torch.uint8)
            for each in (*self._readers, self._listener):
                each.close()

    def __del__(self) -> None:
        if hasattr(self, "_listener"):  # of a stream whose first bucket nobody asked for
            self._listener.close()

    def _meet(self) -> None:
        deadline = time.monotonic() + self._timeout
        while len(self._readers) < self._count:
            self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                reader, _ = self._listener.accept()
            except TimeoutError:
                raise TimeoutError(
                    f"shared weights {self._name!r}: expected {self._count} consumers within {self._timeout:g} s, "
                    f"found {len(self._readers)}. Let each call receive_weights({self._name!r})."
                ) from None
            try:
                _refuse_other_users(reader)
            except PermissionError:
                continue  # no other user can end the stream
            reader.settimeout(self._timeout)
            self._readers.append(reader)

    def _send(self, header: Header, descriptors: list[int]) -> None:
        data = header.to_bytes()
        with _connected():
            for reader in self._readers:
                socket.send_fds(reader, [_LENGTH.pack(len(data))], descriptors)
                reader.sendall(data)

    def _drop(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class FromSharedMemory:
    """Opens the shared memory of a :class:`ToSharedMemory` of this host."""

    def __init__(self, name: str, timeout: float) -> None:
        self._descriptor = -1
        deadline = time.monotonic() + timeout
        address = _address(name)
        while True:
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._connection.connect(address)
                break
            except (ConnectionRefusedError, FileNotFoundError):
                self._connection.close()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"shared weights {name!r}: no process of this host sent under this name within {timeout:g} s. "
                        f"Let one call stream_weights(..., share={name!r})."
                    ) from None
                time.sleep(0.02)
        _refuse_other_users(self._connection)
        self._connection.settimeout(timeout)

    def header(self) -> Header:
        with _connected():
            data, descriptors, _, _ = socket.recv_fds(self._connection, _LENGTH.size, 1)
            self._descriptor = descriptors[0] if descriptors else -1
            data += _receive_exactly(self._connection, _LENGTH.size - len(data))
            return Header.from_bytes(_receive_exactly(self._connection, _LENGTH.unpack(data)[0]))

    def bucket(self, header: Header) -> dict[str, Tensor]:
        starts, nbytes = header.places()
        memory: Any = b""
        if nbytes:
            # Private: writes of this process reach no other.
            memory = mmap.mmap(self._descriptor, nbytes, access=mmap.ACCESS_COPY)
        self._drop()
        return {
            key: torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(shape)
            if math.prod(shape)
            else torch.empty(shape, dtype=dtype)
            for start, (key, dtype, shape) in zip(starts, header.tensors, strict=True)
        }

    def skip(self, header: Header) -> None:
        self._drop()

    def done(self) -> None:
        with _connected():
            self._connection.sendall(_READY)

    def close(self) -> None:
        self._drop()
        with contextlib.suppress(OSError):
            self._connection.close()

    def _drop(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
