"""The report on the memory of a sharded model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.compat.storages import storage_key
from shardwright.engine.extend import NamedMemory
from shardwright.engine.gradients.stepping import SteppedGradient
from shardwright.engine.memory import Plan, Planned
from shardwright.engine.memory.plan import at_peak, peak
from shardwright.engine.model.root import root_of
from shardwright.engine.tensors.parameter import unit_of
from shardwright.engine.unit.owning import units_of


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on one rank, by owner. ``str()`` of it is a table.

    Attributes:
        rank: the rank whose bytes these are; no other rank's are counted.
        shards: this rank's shards of the sharded parameters.
        rest: parameters that are not sharded.
        buffers: the model's buffers.
        gradients: ``.grad`` of all parameters, now.
        optimizer: tensors in the state of the optimizers passed to :func:`memory_report`.
        memory: how the engine's transient memory is allocated.
        leased: bytes of it that are leased now, by kind.
        peak: the most that was leased at once in the recorded step, None before the end of a backward.
        peak_at: unit and kind of the lease that reached it.
        at_peak: bytes that were leased at the peak, by kind.
        plan: the places of slabs in one block, its size, the minimum size of any plan, and the slots of pools.
        leases: number of leases inside and outside of the plans.
        deviations: leases outside the plan: unit, kind, reason and number.
    """

    rank: int
    shards: int
    rest: int
    buffers: int
    gradients: int
    optimizer: int
    memory: str
    leased: dict[str, int]
    peak: int | None
    peak_at: tuple[str, str] | None
    at_peak: dict[str, int]
    plan: Plan | None
    leases: tuple[int, int]
    deviations: tuple[tuple[str, str, str, int], ...]

    def __str__(self) -> str:
        rows = [
            ("shards of parameters", self.shards),
            ("parameters not sharded", self.rest),
            ("buffers", self.buffers),
            ("gradients now", self.gradients),
            ("optimizer state", self.optimizer),
        ]
        rows += [(f"leased now: {kind}", nbytes) for kind, nbytes in sorted(self.leased.items())]
        if self.peak is not None:
            rows.append(("peak of leases in a step", self.peak))
            rows += [(f"  of it {kind}", nbytes) for kind, nbytes in sorted(self.at_peak.items())]
        if self.plan is not None:
            rows.append((f"planned, memory={self.memory!r}", self.plan.nbytes))
            rows.append(("  minimum for any plan", self.plan.lower_bound))
            rows += [(f"  slot as large as unit {unit!r}", nbytes) for _, nbytes, unit in self.plan.slots]
        width = max(len(name) for name, _ in rows)
        lines = [f"Memory of rank {self.rank} alone. Not counted: activations, gradients inside autograd."]
        lines += [f"{name:{width}}  {in_units(nbytes):>10}" for name, nbytes in rows]
        if self.peak_at is not None:
            lines.append(
                f"The peak is reached when unit {self.peak_at[0]!r} leases memory for its {self.peak_at[1]}."
            )
        elif self.peak is None:
            lines.append("No backward has ended yet, so the leases of a step are not known.")
        if self.plan is not None:
            lines.append(f"{self.leases[0]:,} leases inside the plan, {self.leases[1]:,} outside.")
        lines += [
            f"Outside: {kind} of unit {unit!r}, {n:,}x: {why}." for unit, kind, why, n in self.deviations
        ]
        return "\n".join(lines)


def memory_report(
    model: nn.Module, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = ()
) -> MemoryReport:
    """The uses of a sharded model's memory on this rank, now and in a step. It does not communicate.

    The recorded step is the first that an optimizer completed. If memory is not planned, the second replaces it: in the
    first nothing is gathered ahead. Before an optimizer's step it is all work up to the end of the last backward.

    Args:
        model: a sharded model.
        optimizers: one or several optimizers, whose state is counted.

    Raises:
        TypeError: `model` is no module.
        ValueError: the model is not sharded, or an optimizer has none of its parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory_report: expected a torch.nn.Module, found {type(model).__name__}")
    units = units_of(model)
    if not units:
        raise ValueError(f"memory_report needs a sharded model, got a plain {type(model).__name__}")
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    parameters = list(model.parameters())
    own = set(map(id, parameters))
    for optimizer in optimizers:
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"memory_report: expected an optimizer of this {type(model).__name__}, found a "
                f"{type(optimizer).__name__} with parameters of another model"
            )
    shards = [p for p in parameters if unit_of(p) is not None]
    others = [p for p in parameters if unit_of(p) is None]
    state = [
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    leased: dict[str, int] = {}
    for slab in (
        slab for unit in units for slab in unit.weights.copies.slabs() if slab.leased and slab.nbytes
    ):
        leased[slab.kind] = leased.get(slab.kind, 0) + slab.nbytes
    root = root_of(units[0])
    pools = root.pools if root is not None else None
    trace = pools.leases_of_step() if pools is not None else None
    live, last = at_peak(trace) if trace is not None else ([], None)
    at: dict[str, int] = {}
    for item in live:
        at[item.kind] = at.get(item.kind, 0) + item.nbytes
    allocator = pools.allocator if pools is not None else None
    following = allocator if isinstance(allocator, Planned) else None
    leases = Counter(pools.leases) if pools is not None else Counter()
    deviations = Counter(pools.deviations) if pools is not None else Counter()
    if following is not None:
        leases += Counter(planned=following.planned, dynamic=following.dynamic)
        deviations += following.deviations
    memory = pools.memory if pools is not None else units[0].options.memory
    return MemoryReport(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        shards=_bytes_of(shards),
        rest=_bytes_of(others),
        buffers=_bytes_of(model.buffers()),
        gradients=_bytes_of([p.grad for p in parameters if not isinstance(p.grad, SteppedGradient | None)]),
        optimizer=_bytes_of(state),
        memory=memory.name if isinstance(memory, NamedMemory) else type(memory).__name__,
        leased=leased,
        peak=peak(trace) if trace is not None else None,
        peak_at=(last.unit, last.kind) if last is not None else None,
        at_peak=at,
        plan=pools.plan if pools is not None else None,
        leases=(leases["planned"], leases["dynamic"]),
        deviations=tuple((*key, n) for key, n in deviations.items()),
    )


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors' memory on this rank, each storage once."""
    storages = {}
    for tensor in tensors:
        storage = (
            local_of(tensor).untyped_storage() if hasattr(tensor, "to_local") else tensor.untyped_storage()
        )
        storages[storage_key(storage)] = storage.nbytes()
    return sum(storages.values())


def in_units(nbytes: int) -> str:
    """A number of bytes as text with a unit."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    raise AssertionError
