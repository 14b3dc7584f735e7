"""Offload to the CPU: the policy, the memory on the host, and copies to it and from it.

On an accelerator a unit's shards are in the CPU's memory. Before each gather a copy moves the shard (1/N of the unit)
to the device, on a separate stream. After each reduction a copy moves the gradients' shard back. On a CPU mesh there is
one memory, so nothing happens. About an optimizer's state this file knows only its place.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from shardwright.engine.comm import Streams
from shardwright.engine.comm.page_locks import locked_zeros
from shardwright.engine.compat.dtensor import dtensor_of, local_of
from shardwright.engine.compat.tensors import foreach_copy_
from shardwright.engine.memory import Owner, Slab
from shardwright.engine.tensors.gathering import full_of

if TYPE_CHECKING:
    pass

_CPU = torch.device("cpu")


@dataclass
class Offload(OffloadPolicy):
    """An ``offload_policy`` of ``fully_shard``: which parts of a unit are in the CPU's memory between uses.

    ``Offload()`` equals ``CPUOffloadPolicy()``: parameters, gradients and optimizer state, all sharded, are on the CPU,
    and the optimizer steps there. ``Offload(parameters=False, gradients=False)`` offloads only the optimizer state. The
    optimizer then steps on the device, and the state moves to the device and back, unit by unit. For this wrap the
    optimizer with ``sw.fully_shard_optimizer`` or ``sw.optim.in_backward``; other optimizers raise an error at their
    first step.

    Args:
        parameters: the sharded parameters. Gathers read a copy of the shard.
        gradients: the sharded gradients; micro-batches are added up on the CPU, too. torch keeps ``.grad`` where the
            parameter is, so this must equal ``parameters``.
        optimizer: the optimizer's state. Must be True if parameters are offloaded, since the optimizer steps there.
        pin_memory: use page-locked memory on the CPU, so that copies overlap with computation.

    Raises:
        ValueError: a combination that torch does not allow.
    """

    parameters: bool = True
    gradients: bool = True
    optimizer: bool = True
    pin_memory: bool = True

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients", "optimizer", "pin_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Offload: {name} must be True or False, got {getattr(self, name)!r}")
        if self.parameters != self.gradients:
            raise ValueError(
                "Offload: torch keeps the gradient of a parameter where the parameter is, so parameters and "
                f"gradients are offloaded together; got parameters={self.parameters}, gradients={self.gradients}. "
                "Give both the same value."
            )
        if self.parameters and not self.optimizer:
            raise ValueError(
                "Offload: an optimizer steps where its parameters are and keeps its state there; with "
                "parameters=True do not set optimizer=False."
            )


NOTHING = Offload(parameters=False, gradients=False, optimizer=False)


def offload_of(policy: OffloadPolicy) -> Offload:
    """The policy in our own terms. torch has two policies."""
    if isinstance(policy, Offload):
        return policy
    return Offload(pin_memory=policy.pin_memory) if isinstance(policy, CPUOffloadPolicy) else NOTHING


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """``full_tensor()`` on the tensor's device, which all ranks must call. A plain tensor is returned unchanged.

    A DTensor that was offloaded is gathered on the device, where its group communicates.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if isinstance(tensor, DTensor):
        local, mesh = local_of(tensor), tensor.device_mesh
        if local.device.type != mesh.device_type and not local.is_meta:
            there = local.to(torch.device(mesh.device_type))
            moved = dtensor_of(there, mesh, tensor.placements, tensor.shape, tensor.stride())
            return full_of(moved).to(local.device)
    return full_of(tensor)


class HostSlab(Slab):
    """Memory of the CPU. A release keeps it, since page-locked memory is expensive to allocate."""

    def __init__(self, nbytes: int, kind: str, owner: Owner, host: Host) -> None:
        super().__init__(nbytes, _CPU, kind, owner)
        self._host = host
        self._memory: torch.Tensor | None = None

    def lease(self) -> None:
        if self._memory is None:
            self._memory = self._host.lasting_zeros(self.nbytes, torch.uint8)
            self._storage = self._memory.untyped_storage()
        self.leased = True

    def release(self) -> None:
        self.leased = False


class Host:
    """The host of an accelerator: its memory, and asynchronous copies to it and from it."""

    def __init__(self, streams: Streams, device: torch.device, pin_memory: bool) -> None:
        self.streams = streams
        self.device = device
        self._pin = pin_memory and device.type != "cpu"

    def bytes_for_rank(self) -> int:
        """Bytes of this host's memory, divided by its ranks."""
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return memory // max(1, int(ranks) if ranks.isdecimal() else 1)

    def lasting_zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros for values that stay as long as the model. It takes more time than :meth:`zeros`, and no more
        memory than they need."""
        locked = locked_zeros(numel, dtype, self.device) if self._pin else None
        return self.zeros(numel, dtype) if locked is None else locked

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros for values of a step. If they are page-locked, torch rounds their bytes up to a power of two."""
        return torch.zeros(numel, dtype=dtype, device=_CPU, pin_memory=self._pin)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of any class, in such memory. Its class must know ``pin_memory()``, if that is asked for."""
        copied = tensor.to(_CPU, copy=True)
        return copied.pin_memory() if self._pin else copied

    def lifted(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of any class, on the device."""
        return tensor.to(self.device, non_blocking=True, copy=True)

    def mark(self) -> Any:
        """A mark after all work that the computation has queued."""
        with self.streams.fork("upload"):
            return self.streams.mark("upload")

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the host's memory."""
        on_host = tensor.device.type == "cpu" != self.device.type
        return on_host and (not self._pin or tensor.is_pinned())

    def upload(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """Copy to the device, before the next work on the gathers' stream. Returns a mark."""
        mark = self.copy_up(targets, sources)
        with self.streams.beside("gather", mark):
            return mark

    def copy_up(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """Copy to the device, after all work that the computation has queued. Returns a mark."""
        with self.streams.fork("upload"):
            foreach_copy_(targets, sources, True)
        return self.streams.mark("upload")

    def copy_down(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """Copy to the host, after all work that the computation has queued. Returns a mark."""
        with self.streams.fork("download"):
            foreach_copy_(targets, sources, True)
        return self.streams.mark("download")

    def wait(self) -> None:
        """Let the host wait for all work that the computation has queued."""
        self.streams.host_wait(self.mark())

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> Any:
        """Copy to the host, after the mark or all work that the computation has queued. Returns a mark."""
        streams = self.streams
        with streams.fork("download") if after is None else streams.beside("download", after):
            target.copy_(source, non_blocking=True)
        return streams.mark("download")


class HostReads:
    """Copies from a unit's shards in the CPU's memory. The host must not write to the shards until their end."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.mark: Any = None  #: after the last of them

    def wait(self) -> None:
        if self.mark is not None:
            self.host.streams.host_wait(self.mark)
            self.mark = None
