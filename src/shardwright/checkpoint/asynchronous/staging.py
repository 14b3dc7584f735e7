"""Memory that a trainer and its writer process share, and what a save puts into it: boxes of tensors and a description.

The memory is one anonymous file of the system. It only grows, and each save uses it from its first byte. Nothing here
communicates.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shardwright.checkpoint.format.boxes import Box
from shardwright.checkpoint.save.writing import BoxToWrite, Contents
from shardwright.checkpoint.storage.locations import store_of
from shardwright.checkpoint.storage.stores import Store, UnfinishedSave
from shardwright.checkpoint.storage.threads import in_threads, wait_for_devices
from shardwright.engine.comm import lock_pages

_ALIGNMENT = 64  #: bytes; every dtype can be viewed there
_GROWTH = 1 << 21  #: the memory is a multiple of it


class SharedMemory:
    """Bytes that two processes see. The writer process gets ``descriptor``.

    On accelerators of CUDA's kind the trainer's mapping is page-locked, so copies from the device are fast.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("shardwright-checkpoint") if descriptor is None else descriptor
        self.nbytes = os.fstat(self.descriptor).st_size
        self._bytes: Tensor | None = None
        self._locked = False

    def reserve(self, nbytes: int) -> None:
        """Enlarge the memory to at least ``nbytes``.

        Raises:
            OSError: the system has not enough memory.
        """
        if nbytes <= self.nbytes:
            return
        nbytes += -nbytes % _GROWTH
        try:
            # Allocated now: a page that is missing later would be a signal that ends the process.
            os.posix_fallocate(self.descriptor, 0, nbytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no memory for a copy of {nbytes:,} bytes, which an asynchronous save needs: {error.strerror}",
            ) from None
        self._unmap()
        self.nbytes = nbytes

    def bytes(self, lock: bool = False) -> Tensor:
        """Return all of it, as a tensor of uint8. Page-locked if ``lock`` and the system allows it."""
        if self._bytes is None:
            self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, self.nbytes), dtype=torch.uint8)
        if lock and not self._locked:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._locked = lock_pages(runtime, self._bytes.data_ptr(), self.nbytes)
        return self._bytes

    def _unmap(self) -> None:
        if self._bytes is not None and self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes, self._locked = None, False

    def close(self) -> None:
        """Give the memory back, as soon as the other process has done so."""
        self._unmap()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True)
class SaveJob:
    """One save of one rank, as its writer process gets it."""

    store: Store
    rank: int
    overwrite: bool
    boxes: list[BoxToWrite]
    contents: Contents  #: complete on the first rank, which commits
    verified: bool = False  #: read back what was written

    @property
    def unfinished(self) -> UnfinishedSave:
        """The save that the ranks write together."""
        return self.store.unfinished(self.contents.attempt)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@torch.no_grad()
def stage(job: SaveJob, memory: SharedMemory) -> tuple[int, int]:
    """Copy the boxes and their description into the memory. Returns first byte and length of the description.

    The copy is complete on return: the tensors may change.

    Raises:
        OSError: there is no memory for it.
    """
    starts, end = [], 0
    for each in job.boxes:
        starts.append(end)
        end += each.box.local.nbytes
        end += -end % _ALIGNMENT
    text = _description(job, starts)
    memory.reserve(end + len(text))
    target = memory.bytes(lock=any(each.box.local.device.type == "cuda" for each in job.boxes))
    target[end : end + len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    copies = [
        (_view(target, start, each.box.local.dtype, each.box.sizes), each.box.local)
        for start, each in zip(starts, job.boxes, strict=True)
    ]
    for staged, values in copies:
        if values.device.type != "cpu":
            staged.copy_(values, non_blocking=True)
    in_threads([each for each in copies if each[1].device.type == "cpu"], _copy)
    wait_for_devices(values for _, values in copies)
    return end, len(text)


def _copy(copy: tuple[Tensor, Tensor]) -> None:
    staged, values = copy
    with torch.no_grad():  # which each thread has for itself
        staged.copy_(values)


def staged_job(memory: SharedMemory, start: int, length: int) -> SaveJob:
    """Return the job that :func:`stage` has described. Its boxes are views of the memory."""
    source = memory.bytes()
    # The trainer has written it into memory that nobody else can open.
    place, rank, overwrite, boxes, contents, verified = pickle.loads(
        os.pread(memory.descriptor, length, start)
    )
    tensors = contents.tensors
    views = [
        BoxToWrite(name, Box(offsets, _view(source, at, tensors[name].dtype, sizes)))
        for name, offsets, sizes, at in boxes
    ]
    return SaveJob(store_of(place), rank, overwrite, views, contents, verified)


def _description(job: SaveJob, starts: Iterable[int]) -> bytes:
    """Return a job without the values of its boxes, which begin at these bytes of the memory."""
    place = str(job.store.path.absolute() if job.store.path else job.store)
    boxes = [(name, box.offsets, box.sizes, at) for (name, box), at in zip(job.boxes, starts, strict=True)]
    return pickle.dumps((place, job.rank, job.overwrite, boxes, job.contents, job.verified))


def _view(memory: Tensor, start: int, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
    return memory[start : start + prod(sizes) * dtype.itemsize].view(dtype).view(tuple(sizes))
