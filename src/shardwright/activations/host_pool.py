"""Buffers of the host's memory that activations wait in: bounded, and used again in every step.

Sizes repeat from step to step, so a steady step allocates nothing. Nothing here knows tensors, blocks or streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from shardwright.engine import Host


class HostMemoryError(RuntimeError):
    """Raised if activations do not fit into the memory of the host that they may use."""


class HostPool:
    """Page-locked buffers. Each has a power of two as its size, as torch's allocator of such memory gives it.

    Attributes:
        limit: bytes that it takes from the host at most.
        nbytes: bytes that it has taken.
    """

    def __init__(self, host: Host, limit: int) -> None:
        self._host = host
        self.limit = limit
        self.nbytes = 0
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._of_graphs: set[int] = set()  #: addresses of buffers that graphs use: they must not move

    def take_all(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return a buffer for each number of bytes, or none and an error, see :meth:`take`."""
        buffers: list[torch.Tensor] = []
        try:
            for nbytes in sizes:
                buffers.append(self.take(nbytes))
        except BaseException:
            for buffer in buffers:
                self.give_back(buffer)
            raise
        return buffers

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least this number of bytes, until :meth:`give_back`.

        Raises:
            HostMemoryError: the limit would be exceeded; or a graph is captured, while no memory may be allocated.
        """
        capturing = self._host.streams.capturing
        size = rounded(nbytes)
        if self._free[size]:
            buffer = self._free[size].pop()
        elif capturing:
            raise HostMemoryError(
                f"A CUDA graph is captured, and activations need {nbytes:,} bytes more of the host's memory than the "
                "steps before the capture, which cannot be allocated now. Give the steps before the capture the same "
                "shapes, or leave offload_activations out."
            )
        else:
            self._check_room(size)
            buffer = self._allocate(size)
            self.nbytes += size
        if capturing:
            self._of_graphs.add(buffer.data_ptr())
        return buffer

    def _allocate(self, size: int) -> torch.Tensor:
        return self._host.zeros(size, torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free[buffer.nbytes].append(buffer)

    def _check_room(self, size: int) -> None:
        if self.nbytes + size > self.limit:
            self._forget_free()
        if self.nbytes + size > self.limit:
            raise HostMemoryError(
                f"Activations need more than the {self.limit:,} bytes of the host's memory that "
                f"offload_activations may use on this rank: {self.nbytes:,} are in use, and {size:,} more are needed. "
                "Offload fewer blocks, keep less with activation checkpointing, or raise host_bytes."
            )

    def _forget_free(self) -> None:
        """Free the buffers that nothing uses: of sizes that occur no longer."""
        for size, buffers in self._free.items():
            stay = [buffer for buffer in buffers if buffer.data_ptr() in self._of_graphs]
            self.nbytes -= size * (len(buffers) - len(stay))
            buffers[:] = stay


def rounded(nbytes: int) -> int:
    """Return the size of the buffer for a number of bytes."""
    return 1 << max(0, nbytes - 1).bit_length()
