"""Offload to the CPU: what lies there, the memory it has, and gradients on their way there.

On an accelerator a unit's shards lie in the CPU's memory. Each gather is preceded by a copy of the shard (1/N of the
unit) on a stream of its own, each reduction is followed by a copy of the gradients' shard back. On a CPU mesh there is
one memory, so nothing is to be done. Of an optimizer's state nothing is known here but where it is to lie.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from shardwright._torch import dtensor_of, foreach_copy_, local_of
from shardwright.comm import Streams
from shardwright.engine.companion import companion_of
from shardwright.engine.gathering import full_of
from shardwright.engine.gradients import GradientShard, Reduction
from shardwright.memory import Owner, Slab

if TYPE_CHECKING:
    from shardwright.engine.unit import Unit

_CPU = torch.device("cpu")


@dataclass
class Offload(OffloadPolicy):
    """What of a unit lies in the CPU's memory between uses: an ``offload_policy`` of ``fully_shard``.

    ``Offload()`` is what ``CPUOffloadPolicy()`` is: parameters, gradients and optimizer state, all sharded, and the
    optimizer steps on the CPU. ``Offload(parameters=False, gradients=False)`` is the state alone: the optimizer steps
    on the device, and the state passes through it unit by unit, which ``sw.fully_shard_optimizer`` and
    ``sw.optim.in_backward`` see to. Others are refused at their first step.

    Args:
        parameters: the sharded parameters. Gathers read a copy of the shard.
        gradients: the sharded gradients, where micro-batches are added up, too. As torch keeps ``.grad`` where the
            parameter is, both or none.
        optimizer: the optimizer's state. True where parameters are offloaded, since the step is made where they are.
        pin_memory: allocate what is offloaded in page-locked memory, from which copies overlap with computation.

    Raises:
        ValueError: a choice that torch's rules leave no room for.
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
                "Offload: torch keeps the gradient of a parameter where the parameter is, so parameters and gradients "
                f"are offloaded together, got parameters={self.parameters}, gradients={self.gradients}. Give both the "
                "same value."
            )
        if self.parameters and not self.optimizer:
            raise ValueError(
                "Offload: an optimizer steps where its parameters are and keeps its state there; with parameters=True "
                "leave optimizer at True."
            )


NOTHING = Offload(parameters=False, gradients=False, optimizer=False)


def offload_of(policy: OffloadPolicy) -> Offload:
    """The policy in our own terms. Of torch's there are two."""
    if isinstance(policy, Offload):
        return policy
    return Offload(pin_memory=policy.pin_memory) if isinstance(policy, CPUOffloadPolicy) else NOTHING


def refuse_state_on_device(optimizer: torch.optim.Optimizer, units: Iterable[Unit]) -> None:
    """Raise if the optimizer does not keep its state where the units' policy says."""
    if not companion_of(optimizer).brings_state:
        for unit in units:
            if unit.state_host is not None:
                raise RuntimeError(
                    f"Unit {unit.name!r} has Offload(parameters=False), by which optimizer state lies in the CPU's "
                    f"memory, and this {type(optimizer).__name__} would keep it on {unit.ranks.device}. Pass it "
                    "through shardwright.fully_shard_optimizer first."
                )


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """``full_tensor()`` where the tensor is, which all ranks must call; a plain tensor as it is.

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
    """Memory of the CPU. It stays when it is released, since page-locked memory is dear to get."""

    def __init__(self, nbytes: int, kind: str, owner: Owner, host: Host) -> None:
        super().__init__(nbytes, _CPU, kind, owner)
        self._host = host
        self._memory: torch.Tensor | None = None

    def lease(self) -> None:
        if self._memory is None:
            self._memory = self._host.zeros(self.nbytes, torch.uint8)
            self._storage = self._memory.untyped_storage()
        self.leased = True

    def release(self) -> None:
        self.leased = False


class Host:
    """The CPU beside an accelerator: memory, and copies there and back that nothing waits for but who needs them."""

    def __init__(self, streams: Streams, device: torch.device, pin_memory: bool) -> None:
        self.streams = streams
        self.device = device
        self._pin = pin_memory and device.type != "cpu"

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=_CPU, pin_memory=self._pin)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of any class, in such memory. Its class must know ``pin_memory()``, if that is asked for."""
        copied = tensor.to(_CPU, copy=True)
        return copied.pin_memory() if self._pin else copied

    def lifted(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of any class, on the device."""
        return tensor.to(self.device, non_blocking=True, copy=True)

    def mark(self) -> Any:
        """A mark after all that the computation has queued."""
        with self.streams.fork("upload"):
            return self.streams.mark("upload")

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in such memory."""
        on_host = tensor.device.type == "cpu" != self.device.type
        return on_host and (not self._pin or tensor.is_pinned())

    def upload(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """Copy to the device, before what is queued on the gathers' stream next. Returns a mark."""
        mark = self.copy_up(targets, sources)
        with self.streams.beside("gather", mark):
            return mark

    def copy_up(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """Copy to the device, after all that the computation has queued. Returns a mark."""
        with self.streams.fork("upload"):
            foreach_copy_(targets, sources, True)
        return self.streams.mark("upload")

    def copy_down(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """Copy to the host, after all that the computation has queued. Returns a mark."""
        with self.streams.fork("download"):
            foreach_copy_(targets, sources, True)
        return self.streams.mark("download")

    def wait(self) -> None:
        """The host waits for all that the computation has queued."""
        self.streams.host_wait(self.mark())

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> Any:
        """Copy to the host, after the mark or all that the computation has queued. Returns a mark."""
        streams = self.streams
        with streams.fork("download") if after is None else streams.beside("download", after):
            target.copy_(source, non_blocking=True)
        return streams.mark("download")


class HostReduction(Reduction):
    """Gradients that end on the host. :meth:`finish` starts the copy, :meth:`land` waits for it and hands them over."""

    def __init__(self, *given: Any, host: Host) -> None:
        super().__init__(*given)
        self._host = host
        self._landing: torch.Tensor | None = None  #: what the copy under way fills
        self._landed: Any = None  #: the mark after that copy
        self._reduced: Any = None  #: the mark after the last collective

    @property
    def lands(self) -> bool:
        """Whether a copy to the host is under way."""
        return self._landing is not None

    def _begin(self, *given: Any) -> None:
        super()._begin(*given)
        shard = self._shard
        if self._output is not None and shard is not None and self._output is shard.flats[0]:
            self._sum.lease()
            self._output = self._sum_flat

    @torch.inference_mode(False)
    def _new_shard(self) -> GradientShard:
        return GradientShard(self.packing, self._parameters, _CPU, self._owner, self._host_slab)

    def _host_slab(self, nbytes: int) -> Slab:
        return HostSlab(nbytes, "gradients", self._owner, self._host)

    def finish(self, hook: Any = None) -> None:
        if self._pending is not None:
            self.go_on()
            self._reduced = self._pending.mark if hook is None else None
        super().finish(hook)

    def _deliver(self, output: torch.Tensor, hook: Any) -> None:
        if hook is not None:
            hook(output[: self.packing.flags])
        shard = self._shard
        direct = self._fresh and shard is not None and shard.direct and self._has_no_gradients()
        assert shard is not None or not direct
        self._landing = (
            shard.flats[0]
            if direct and shard is not None
            else self._host.zeros(self.packing.numel, self.packing.reduce_dtype)
        )
        after, self._reduced = self._reduced, None
        self._landed = self._host.download(self._landing, output, after)

    def _release_sum(self) -> None:
        """Not yet: the copy reads it."""

    def leave_device(self) -> None:
        """The computation waits for the copy, and the device's memory is given back."""
        if self._landing is not None and self._sum.leased:
            self._host.streams.join(self._landed)
            self._sum.release()

    @property
    def arrived(self) -> bool:
        """Whether :meth:`land` need not wait."""
        return self._landing is None or self._host.streams.is_over(self._landed)

    def land(self) -> None:
        """The host waits for the copy, and sets or adds to every used parameter's ``.grad``."""
        if self._landing is None:
            return
        self.leave_device()
        self._host.streams.host_wait(self._landed)
        landing, self._landing, self._landed = self._landing, None, None
        super()._deliver(landing, None)

    def discard(self) -> None:
        super().discard()
        if self._landing is not None:
            self.leave_device()
            self._host.streams.host_wait(self._landed)
            self._landing = self._landed = None

    def release_unused(self) -> None:
        if self._landing is None:
            super().release_unused()


class Arrivals:
    """Units of a model whose gradients are on their way to the host, the oldest first."""

    def __init__(self) -> None:
        self._units: list[weakref.ref[Unit]] = []

    def _list(self) -> list[Unit]:
        return [unit for ref in self._units if (unit := ref()) is not None and unit.arriving]

    def add(self, unit: Unit) -> None:
        """One more. What the device holds of those before it is given back, so that it is one unit's at a time."""
        for other in self._list():
            other.leave_device()
        unit.arriving = any(r.lands for r in unit.reductions if isinstance(r, HostReduction))
        if unit.arriving:
            self._units = [ref for ref in self._units if ref() is not unit] + [weakref.ref(unit)]

    def poll(self) -> None:
        """Hand over, and step, what has arrived by now."""
        for unit in self._list():
            if not unit.has_arrived():
                return
            unit.land()

    def end_backward(self) -> None:
        """Wait for all that the user may look at now. What is to be stepped is waited for when it is needed."""
        self.poll()
        for unit in self._list():
            unit.leave_device()
            if unit.stepping is None or not unit.stepping.due or unit.calls:
                unit.land()
            else:
                unit.late = True
                unit.stepping.mark(unit, [p.sharded for p in unit.parameters if p.sharded.requires_grad])

    def recover(self) -> None:
        """A backward has failed: its own are dropped with the unit's reductions, those of the one before stay."""
        for unit in self._list():
            if unit.late:
                unit.complete()
