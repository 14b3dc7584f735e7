"""Memory that the network reads and writes without a copy: registered by a backend, or symmetric over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from shardwright._torch import backend_for, make_symmetric, memory_can_be_swapped, symmetric_pool
from shardwright.comm.collectives import Communicator


def _check_torch(what: str) -> None:
    if not memory_can_be_swapped:
        raise NotImplementedError(f"{what} needs torch 2.12 or later; this is {torch.__version__}")


class RegisteredMemory:
    """What a process group's backend allocates for itself: with NCCL registered, so that SHARP and NVLink reach it.

    Raises:
        NotImplementedError: the backend, or this build of it, allocates none.
    """

    kinds: frozenset[str] | None = None

    def __init__(self, comm: Communicator) -> None:
        _check_torch("memory from the process group")
        assert comm.group is not None
        self._backend = backend_for(comm.group, comm.device)
        if not self._backend.supports_tensor_alloc(comm.device):
            raise NotImplementedError(
                f"The backend {self._backend.name()!r} allocates no memory on {comm.device}; NCCL on CUDA devices "
                "does, if its version and the hardware allow it. Remove the call of "
                "set_allocate_memory_from_process_group_for_comm."
            )

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        memory: torch.Tensor = self._backend.allocate_tensor(nbytes, dtype=torch.uint8, device=device)
        return memory


class SymmetricMemory:
    """Memory of one size on all ranks, which know it of each other: gathers by copy engines or symmetric kernels.

    All ranks must make it, and take memory from it, in the same order; so it is for parameters, of which all ranks
    lease the same.

    Raises:
        NotImplementedError: the device is no CUDA device, or torch has no such memory.
    """

    kinds: frozenset[str] | None = frozenset({"parameters"})

    def __init__(self, comms: Sequence[Communicator], backend: Literal["NCCL"]) -> None:
        _check_torch("symmetric memory")
        device = comms[0].device
        if device.type != "cuda":
            raise NotImplementedError(
                f"Symmetric memory needs NCCL on CUDA devices; this model is on {device}. Remove the call of "
                "set_symm_mem_for_comm."
            )
        self._groups = [comm.group for comm in comms]
        self._pool = symmetric_pool(device, backend)
        for group in self._groups:
            dist.barrier(
                group=group
            )  # the memory is made known through the group's communicator, which this makes

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._pool):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for group in self._groups:
            make_symmetric(memory, group)
        return memory
