"""Bytes that autograd has saved, on the device and in the host's memory, and the saved tensors over them.

When they move is for ``offload`` to say. Nothing here knows blocks or streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.activations.host_pool import HostPool
from shardwright.engine.compat import dtensor_of

_ALIGNMENT = 512  #: bytes of a device's allocations. Kernels may depend on the alignment of their tensors.


class StoredBytes:
    """Bytes of a storage that autograd has saved: on the device, in a buffer of the host, or both.

    Attributes:
        memory: the storage on the device; None: only the host has the bytes.
        start, nbytes: where they are in it.
        buffer: the host's buffer.
        mark: the mark after the last copy to the device.
        uses: the number of calls for which they are on the device.
    """

    __slots__ = (
        "__weakref__", "_aliases", "_changed", "_pool", "buffer", "device", "mark", "memory", "nbytes", "start", "uses",
    )  # fmt: skip

    def __init__(self, memory: torch.UntypedStorage, start: int, nbytes: int) -> None:
        self.memory: torch.UntypedStorage | None = memory
        self.device = memory.device
        self.start, self.nbytes = start, nbytes
        self.buffer: Tensor | None = None
        self.mark: Any = None
        self.uses = 0
        self._pool: HostPool | None = None
        self._aliases: list[tuple[Tensor, int]] = []
        self._changed = False

    def note(self, tensor: Tensor) -> None:
        """Note that autograd has saved this view of it."""
        self._aliases.append((tensor, tensor._version))

    def was_changed(self) -> bool:
        """Return whether an operation has written to a saved view, while the device had it."""
        self._changed = self._changed or any(t._version != version for t, version in self._aliases)
        return self._changed

    def keep_in(self, buffer: Tensor, pool: HostPool) -> None:
        self.buffer, self._pool = buffer, pool

    def make_memory(self) -> None:
        """Take new memory of the device, with undefined content and the old alignment, on the current stream."""
        self.start %= _ALIGNMENT
        self.memory = torch.empty(
            self.start + self.nbytes, dtype=torch.uint8, device=self.device
        ).untyped_storage()

    def release_memory(self) -> None:
        self.was_changed()
        self._aliases.clear()
        if self.buffer is not None:
            self.memory = self.mark = None

    def view(self, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
        """Return a tensor over the device's memory, ``offset`` in bytes from the first byte that moves."""
        assert self.memory is not None
        elements = (self.start + offset) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=self.device).set_(self.memory, elements, size, stride)

    @property
    def has_bytes(self) -> bool:
        """Whether the device has them. An engine may have freed its own memory, which it fills again for backward."""
        return self.memory is not None and self.memory.nbytes() >= self.start + self.nbytes

    @property
    def device_bytes(self) -> Tensor:
        return self.view(torch.uint8, 0, (self.nbytes,), (1,))

    @property
    def host_bytes(self) -> Tensor:
        assert self.buffer is not None
        return self.buffer[: self.nbytes]

    def __del__(self) -> None:
        if self.buffer is not None and self._pool is not None:
            self._pool.give_back(self.buffer)


class SavedView:
    """A saved tensor: a view of a storage that moves."""

    __slots__ = ("_as_saved", "_dtype", "_offset", "_stride", "size", "storage")

    def __init__(self, storage: StoredBytes, tensor: Tensor, whole: Tensor) -> None:
        self.storage = storage
        self._dtype, self.size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        #: From the first byte that moves.
        self._offset = int(tensor.storage_offset()) * tensor.element_size() - storage.start
        self._as_saved: Callable[[Tensor], Tensor] | None = None
        if isinstance(whole, DTensor):
            mesh, placements, shape, stride = whole.device_mesh, whole.placements, whole.shape, whole.stride()
            self._as_saved = lambda local: dtensor_of(local, mesh, placements, shape, stride)

    def tensor(self) -> Tensor:
        local = self.storage.view(self._dtype, self._offset, self.size, self._stride)
        return local if self._as_saved is None else self._as_saved(local)


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the number of bytes up to its last one."""
    last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset()) * tensor.element_size(), (last + 1) * tensor.element_size()
