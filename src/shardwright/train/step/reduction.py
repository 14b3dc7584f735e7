"""The one reduction of a step: all that ranks must know of each other before they step, added up in one row.

Losses, signals, votes and metrics of hooks travel together. The host waits for the device here and nowhere else in a
step: at once, or one step late (`[fault] check`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.engine.comm import noted
from shardwright.optim import ParameterNorms
from shardwright.train.config.catalog.hooks import Action, Fault
from shardwright.train.config.catalog.records import Incident
from shardwright.train.launch.signals import SIGNALS
from shardwright.train.parallel.world import World
from shardwright.train.step.account.clock import StepClock
from shardwright.train.step.feed import Untrained
from shardwright.train.step.hooks import ACTIONS, means
from shardwright.train.step.numerics.not_finite import marks, wrong_ranks

T = TypeVar("T")
Row = TypeVar("Row", Tensor, list[float])


@dataclass(frozen=True)
class OwnPart:
    """The values that one rank adds.

    Attributes:
        shares: its parts of the losses, float64 [losses], on the device.
        flag: 1 if the gradient norm is not finite, else 0; float64 [1], on the device.
        norm: the gradient norm, which all ranks have; None if there is none.
        data_seconds: its wait for data.
        signal: the signal that it got; None for none.
        save_ended: it knows that a checkpoint in the background is written or has failed.
        stops_early: one of its hooks has asked to end the run.
        votes: the actions that its hooks ask for.
        sums: sums and counts of the metrics of its hooks.
        norms: the norms of which `norm` is made, which all ranks have; None if this step does not record them.
    """

    shares: Tensor
    flag: Tensor
    norm: Tensor | None
    data_seconds: float
    signal: int | None
    save_ended: bool
    stops_early: bool
    votes: Sequence[str]
    sums: Sequence[float | Tensor]
    norms: ParameterNorms | None = None


@dataclass(frozen=True)
class Agreed:
    """The values that all ranks have after the reduction, equal on all.

    Attributes:
        losses: means over all trained tokens of the step.
        flags: ranks whose gradient norm is not finite.
        norm: the gradient norm; None if there is none.
        data_seconds: the wait of the rank that waited longest.
        signal: the signal by which all stop; 0 for none. Signals reach ranks at different moments.
        save_ended, stops_early: a rank has said so.
        action: the strongest that a hook has asked for; None for none.
        metrics: by name, those of hooks.
        not_finite: by name, the ranks in words whose part of a metric is nan or infinite.
        unit_norms: gradient norms by unit, before clipping; empty if this step does not record them.
        mark: the device has left this step out, see `Reduction.with_mark`.
    """

    losses: list[float]
    flags: float
    norm: float | None
    data_seconds: float
    signal: int
    save_ended: bool
    stops_early: bool
    action: Action | None
    metrics: Mapping[str, float]
    not_finite: Mapping[str, str]
    unit_norms: Mapping[str, float]
    mark: bool = False


@dataclass(frozen=True)
class StepResult:
    """A step, as all ranks know it.

    Attributes:
        agreed: the values of the reduction.
        loss: the cross-entropy alone.
        auxiliary: by name, the losses beside it.
        rate: of the optimizer's first group.
        fault: wrong numbers, for which the step was not done; None without any.
        untrained: global batches before this one, of which no step was made.
        repeat: wrong numbers with which the step was done first, and left out; None without any.
    """

    agreed: Agreed
    loss: float
    auxiliary: Mapping[str, float]
    rate: float
    fault: Fault | None
    untrained: Untrained | None
    repeat: Incident | None = None


@dataclass(frozen=True)
class Reduction:
    """A row that is being added up: the device has it, the host has not read it.

    Attributes:
        row: the sums, float64, on the device.
        parts: the parts of the row, by name, for their lengths.
        part: this rank's part.
        copied: the row in memory of the host, and the event after which it is there. None: `read` waits for the device.
    """

    world: World
    row: Tensor
    parts: Mapping[str, Tensor]
    part: OwnPart
    metric_names: Sequence[str]
    copied: tuple[Tensor, torch.Event] | None = None

    @property
    def loss(self) -> Tensor:
        """The first of the losses, 0-d, on the device."""
        return split(self.row, self.parts)["losses"][0] / self.world.dims.with_same_loss

    @property
    def is_wrong(self) -> Tensor:
        """Whether the loss or a gradient norm is not finite: bool, 0-d, on the device."""
        return ~self.loss.isfinite() | (split(self.row, self.parts)["flags"][0] > 0)

    def with_mark(self, mark: Tensor) -> Reduction:
        """Return the same with one more number in the row, `Agreed.mark`, and with a copy of it on its way to the
        host."""
        parts = {**self.parts, "mark": mark.to(self.row.dtype).view(1)}
        row = torch.cat([self.row, parts["mark"]])
        if row.device.type == "cpu":
            return replace(self, row=row, parts=parts)
        on_host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        on_host.copy_(row, non_blocking=True)
        event = torch.Event(row.device)
        event.record()
        return replace(self, row=row, parts=parts, copied=(on_host, event))

    def read(self, clock: StepClock) -> Agreed:
        """Return the sums. The host waits for them."""
        clock.to("communication")
        with noted("wait for the loss", None):
            clock.wait_begins()
            row = self.row
            if self.copied is not None:
                row, event = self.copied
                event.synchronize()
            totals = split(row.tolist(), self.parts)
            clock.wait_ends()
        clock.to("host")
        part = self.part
        return Agreed(
            losses=[loss / self.world.dims.with_same_loss for loss in totals["losses"]],
            flags=totals["flags"][0],
            norm=totals["norm"][0] if part.norm is not None else None,
            data_seconds=max(totals["waits"]),
            signal=int(_first_chosen(SIGNALS, totals["signals"]) or 0),
            save_ended=totals["save_ended"][0] > 0,
            stops_early=totals["stops_early"][0] > 0,
            action=_first_chosen(ACTIONS, totals["actions"]),
            metrics=means(self.metric_names, totals["sums"]),
            not_finite=wrong_ranks(self.metric_names, totals["marks"], self.world.size),
            unit_norms={} if part.norms is None else part.norms.by_unit(totals["norms"]),
            mark=bool(totals.get("mark", [0.0])[0]),
        )


def agree(world: World, part: OwnPart, metric_names: Sequence[str], clock: StepClock | None = None) -> Agreed:
    """Add the parts of all ranks up, and read the sums. Called by all ranks together. `clock`: of the step."""
    clock = clock or StepClock()
    return add_up(world, part, metric_names, clock).read(clock)


def add_up(world: World, part: OwnPart, metric_names: Sequence[str], clock: StepClock) -> Reduction:
    """Begin to add the parts of all ranks up. The host does not wait for a device. Called by all ranks together."""
    clock.to("communication")
    waits = [0.0] * world.size  # a rank adds to its own number alone, so the sum keeps them apart
    waits[world.rank] = part.data_seconds
    numbers: dict[str, Sequence[float | Tensor]] = {
        "signals": [part.signal == number for number in SIGNALS],
        "save_ended": [part.save_ended],
        "stops_early": [part.stops_early],
        "actions": [action in part.votes for action in ACTIONS],
        "waits": waits,
        "sums": part.sums,
    }
    # One copy from the host.
    parts = split(world.figures([*itertools.chain(*numbers.values())]), numbers)
    parts |= {"losses": part.shares, "flags": part.flag}
    parts["marks"] = marks(parts["sums"].view(len(metric_names), 2), world.rank)
    row = torch.cat([*parts.values()])
    with noted("all-reduce of the loss", None):
        dist.all_reduce(row)
    if part.norm is not None:
        parts["norm"] = part.norm.to(row.device, row.dtype, non_blocking=True)[None]
        row = torch.cat([row, parts["norm"]])
    if part.norms is not None:
        parts["norms"] = part.norms.norms.to(row.device, row.dtype, non_blocking=True)
        row = torch.cat([row, parts["norms"]])
    clock.to("host")
    return Reduction(world, row, parts, part, metric_names)


def split(row: Row, parts: Mapping[str, Sized]) -> dict[str, Row]:
    """Return the parts of a row by their names. It has values for all of `parts`, one after another, in their order."""
    stops = itertools.accumulate(map(len, parts.values()))
    return {name: row[stop - len(parts[name]) : stop] for name, stop in zip(parts, stops, strict=True)}


def _first_chosen(options: Sequence[T], counts: Sequence[float]) -> T | None:
    """Return the first option that a rank has chosen. `counts`: of the ranks that chose each."""
    return next((option for option, count in zip(options, counts, strict=True) if count), None)
