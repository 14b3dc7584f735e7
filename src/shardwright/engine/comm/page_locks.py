"""Page-locked memory of the host in exact sizes, for values that stay as long as a model.

torch's allocator of such memory gives blocks of powers of two, so on average a third of them is lost. It is right for
what comes and goes in each step, because it keeps its blocks and knows the copies that still use one. Nothing here
copies.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch

from shardwright.engine.compat.modes import infers_shapes

LEAST = 1 << 16
"""Bytes below which torch's allocator is used, because a lock has a cost of its own and ends on a border of pages."""
PORTABLE = 1  #: a flag of CUDA: the lock holds for all of its contexts

#: Memory whose tensors are gone, and which is still locked: the device, the address and the memory.
_left: list[tuple[torch.device, int, mmap.mmap]] = []


def runtime_of(device: torch.device) -> Any:
    """Return the functions of CUDA that lock pages, which ROCm has by the same names; None for other devices."""
    return torch.cuda.cudart() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def lock_pages(runtime: Any, address: int, nbytes: int) -> bool:
    """Lock the pages of existing memory, so that copies to and from a device need not wait. Return whether the system
    has done so."""
    if int(runtime.cudaHostRegister(address, nbytes, PORTABLE)) == 0:
        return True
    # CUDA keeps the failure until somebody asks, and the next kernel that torch launches asks and would raise it,
    # somewhere in training.
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")  # a kernel
    return False


def locked_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Return zeros in page-locked memory for copies to and from the device.

    None for few bytes, for devices that are not of CUDA's kind, where tensors are fake, and where the system cannot
    lock so much.
    """
    nbytes = numel * dtype.itemsize
    if nbytes < LEAST or infers_shapes(()) or (runtime := runtime_of(device)) is None:
        return None
    _give_back()
    pages = nbytes + -nbytes % mmap.PAGESIZE
    # Shared: a process that is forked sees the same pages. Of private ones that are locked it would copy all.
    memory = mmap.mmap(-1, pages)
    exported = (ctypes.c_char * nbytes).from_buffer(memory)
    address = ctypes.addressof(exported)
    if not lock_pages(runtime, address, pages):
        return None
    # A tensor may end in any thread, inside any function of CUDA, so its end only notes the memory. When the process
    # ends, so does the lock.
    weakref.finalize(exported, _left.append, (device, address, memory)).atexit = False
    return torch.frombuffer(exported, dtype=dtype)


def _give_back() -> None:
    """Unlock and free the memory whose tensors are gone."""
    while _left:
        noted = (
            _left.pop()
        )  # before anything else: a tensor that ends meanwhile adds its own memory behind it
        device, address, _ = noted
        try:
            torch.accelerator.synchronize(device)  # a copy that was queued may still use it
        except BaseException:
            _left.append(noted)
            raise
        runtime_of(device).cudaHostUnregister(address)
