"""Steps on the terminal: a progress bar, or plain lines for logs and pipes, and the meaning of each figure.

Nothing here measures or computes figures.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from shardwright.train.config.catalog.records import RunEnd, StepRecord


class Lines:
    """Plain lines for logs and pipes. Steps up to `printed` were printed before a restart, into the same log."""

    def __init__(self, steps: int, every: int, printed: int = 0) -> None:
        self.steps, self.every, self._printed = steps, every, printed
        self._explained = False

    def step(self, record: StepRecord) -> None:
        if record.step <= self._printed:
            self._explain(record.step)
        elif record.step % self.every == 0 or record.step == self.steps or record.validation_loss is not None:
            print(
                f"step {record.step:>{len(str(self.steps))}}/{self.steps}  {'  '.join(figures_of(record))}",
                flush=True,
            )

    def _explain(self, step: int) -> None:
        if not self._explained:
            steps = f"step {step} runs" if step == self._printed else f"steps {step} to {self._printed} run"
            print(f"{steps} again; the figures are above, before the restart", flush=True)
        self._explained = True

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self, end: RunEnd) -> None:
        pass


@dataclass(frozen=True)
class Figures:
    """Figures for a terminal, on as many lines as its width needs.

    Without this class rich would break lines inside a figure, between a number and its unit.
    """

    parts: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in lines_of(self.parts, options.max_width):
            yield Text(line)


class BarOverFigures(Progress):
    """A progress bar with figures below it."""

    figures = Figures()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield self.figures


class Bar:
    """A progress bar on a terminal, the newest figures below it."""

    def __init__(self, steps: int, steps_done: int, every: int, console: Console) -> None:
        self.steps, self.every = steps, every
        labels = len(f" {steps}/{steps} steps 0:00:00 elapsed 0:00:00 left")
        columns = (
            BarColumn(bar_width=max(1, min(40, console.width - labels))),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("elapsed"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self.progress = BarOverFigures(*columns, console=console, refresh_per_second=4)
        self.task: TaskID = self.progress.add_task("", total=steps, completed=steps_done)
        self.progress.start()

    def step(self, record: StepRecord) -> None:
        if record.step % self.every == 0 or record.step == self.steps:
            self.progress.figures = Figures(figures_of(record))
        self.progress.update(self.task, completed=record.step)
        if record.validation_loss is not None:
            metrics = "".join(f", {name} {value:.4f}" for name, value in record.validation_metrics.items())
            self.say(f"step {record.step}: validation loss {record.validation_loss:.4f}{metrics}")

    def say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)

    def close(self, end: RunEnd) -> None:
        self.progress.stop()


def lines_of(parts: Sequence[str], width: int) -> list[str]:
    """The parts, two spaces between them, on lines of at most `width` columns where each part fits in one."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


COMMON_LOSSES = ("mtp", "balance")
"""Losses beside the cross-entropy that have a field in `StepRecord`. They are shown before the others."""


FIGURES = (*COMMON_LOSSES, "norm", "tok/s", "FLOP/s", "MFU", "mem", "data")
"""Names in the lines of steps that are no fields of `StepRecord`."""


def figures_of(record: StepRecord) -> list[str]:
    """The figures of a step for the terminal. `explain_figures` gives their meanings."""
    lost = record.data_seconds / record.seconds if record.seconds else 0.0
    optional = (
        ("validation", record.validation_loss),
        ("mtp", record.mtp_loss),
        ("balance", record.balance_loss),
    )
    parts = [f"loss {record.loss:.4f}"]
    parts += [f"{name} {value:.4f}" for name, value in optional if value is not None]
    parts += [
        f"{name} {value:.4f}" for name, value in record.extra_losses.items() if name not in COMMON_LOSSES
    ]
    parts += [f"validation {name} {value:.4f}" for name, value in record.validation_metrics.items()]
    parts += [f"{name} {value:.4f}" for name, value in record.metrics.items()]
    if record.grad_norm is not None:
        parts.append(f"norm {record.grad_norm:.2f}")
    parts += [
        f"{record.tokens_per_second:,.0f} tok/s",
        f"{with_prefix(record.flops_per_second)}FLOP/s",
    ]
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    active, reserved = (part / record.memory_total for part in (record.memory_active, record.memory_reserved))
    parts += [
        f"mem {gib(record.memory_active)}/{gib(record.memory_reserved)} GiB ({active:.0%}/{reserved:.0%})",
        f"data {lost:.1%}",
    ]
    return parts


def explain_figures(
    device: torch.device,
    *,
    validation: bool,
    norm: bool,
    mfu: bool,
    auxiliary: Mapping[str, float],
    meanings: Mapping[str, str],
    metrics: Mapping[str, str],
) -> str:
    """The meaning of each figure of `figures_of` in this run, one line each.

    Args:
        device: the model's device; on the CPU memory is measured in another way.
        validation, norm, mfu: whether steps have these figures.
        auxiliary: names and weights of the losses beside the cross-entropy.
        meanings: what these losses are, by name, as the model says; of others only the weight is known.
        metrics: what the metrics of hooks are, by name.
    """
    if device.type == "cuda":
        memory = "peak of rank 0's GPU: tensors / held by torch (part of its memory)"
    else:
        memory = "rank 0's process: now / peak so far (part of the machine's RAM)"
    further = [name for name in COMMON_LOSSES if name in auxiliary]
    further += [name for name in auxiliary if name not in COMMON_LOSSES]
    figures = {
        "loss": "cross-entropy per token in nats, before the step's update",
        "validation": "the same after the update, on text that no step trains on" if validation else "",
        **{
            name: meanings.get(name)
            or f"further loss of this model; its weight in training is {auxiliary[name]:g}"
            for name in further
        },
        **metrics,
        "norm": "gradient norm over all ranks, before clipping" if norm else "",
        "tok/s": "tokens per second, all ranks together",
        "FLOP/s": "operations that the model needs, per second and device",
        "MFU": "FLOP/s as a fraction of the device's peak" if mfu else "",
        "mem": memory,
        "data": "share of the step in which the slowest rank waited for data",
    }
    entries = (
        textwrap.wrap(
            f"{name:<10}  {meaning}",
            80,
            initial_indent="  ",
            subsequent_indent=" " * 14,
            break_long_words=False,
        )
        for name, meaning in figures.items()
        if meaning
    )
    return "\n".join(["figures of a step:", *itertools.chain(*entries)])


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def with_prefix(value: float) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.1f} {prefix}"
    return f"{value:.0f} "
