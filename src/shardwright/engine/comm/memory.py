"""Memory that the network reads and writes without a copy: registered by a backend, or symmetric over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from shardwright.engine.comm.collectives import Communicator
from shardwright.engine.compat.collectives import backend_for
from shardwright.engine.compat.storages import make_symmetric, prepare_to_swap_memory, symmetric_pool


class RegisteredMemory:
    """Memory that a process group's backend allocates. NCCL registers it, so SHARP and NVLink can use it.

    Raises:
        NotImplementedError: the backend, or this build of it, allocates none.
    """

    kinds: frozenset[str] | None = None

    def __init__(self, comm: Communicator) -> None:
        prepare_to_swap_memory()
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
    """Symmetric memory: copy engines or symmetric kernels of one rank can reach it on the other ranks.

    All ranks must make it, and take equal sizes from it, in the same order. So it is only for parameters, because all
    ranks lease the same parameters.

    Raises:
        NotImplementedError: the device is no CUDA device, or torch has no such memory.
    """

    kinds: frozenset[str] | None = frozenset({"parameters"})

    def __init__(self, comms: Sequence[Communicator], backend: Literal["NCCL"]) -> None:
        device = comms[0].device
        if device.type != "cuda":
            raise NotImplementedError(
                f"Symmetric memory needs NCCL on CUDA devices; this model is on {device}. Remove the call of "
                "set_symm_mem_for_comm."
            )
        prepare_to_swap_memory()
        self._groups = [comm.group for comm in comms]
        self._pool = symmetric_pool(device, backend)
        for group in self._groups:
            dist.barrier(group=group)  # makes the group's communicator, through which ranks find the memory

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._pool):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for group in self._groups:
            make_symmetric(memory, group)
        return memory
