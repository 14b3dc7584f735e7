"""The metrics of a run: one record per step, written to the terminal, to JSONL and to TensorBoard.

This file formats records, measures this process's memory, and writes. It never computes losses or communicates.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

import psutil
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

from shardwright.train.errors import UserError
from shardwright.train.steps import INCIDENT
from shardwright.train.writing import writing


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@dataclass(frozen=True)
class Memory:
    """Bytes that are used, and the total that exists.

    CUDA: peak bytes of tensors (active) and of the allocator (reserved) since the last measurement; total is the
    device's memory. CPU: bytes of the process now (active) and at its peak (reserved); total is the machine's memory.
    """

    active: int
    reserved: int
    total: int


def measure_memory(device: torch.device) -> Memory:
    """This process's memory. On CUDA this resets the peaks."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        torch.cuda.reset_peak_memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        return Memory(stats.get("active_bytes.all.peak", 0), stats.get("reserved_bytes.all.peak", 0), total)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    now = psutil.Process().memory_info().rss
    return Memory(now, max(now, peak), psutil.virtual_memory().total)


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl.

    Losses are means over all tokens of the step on all ranks; `loss` is the cross-entropy alone. `extra_losses` has
    all other losses of the model, by the names in `LanguageModel.auxiliary`.
    """

    step: int  # optimizer steps done, this one included
    loss: float
    grad_norm: float | None  # before clipping; None with an optimizer in backward
    lr: float
    samples: int  # seen since the start of the run
    seconds: float  # of the step, without validation and checkpoints
    data_seconds: float  # part of `seconds` in which the rank that waited longest waited for data
    tokens_per_second: float  # of all ranks
    flops_per_second: float  # of the model (not of the hardware), per device
    mfu: float | None  # part of the device's bf16 peak; None in float32 or where the peak is not known
    memory_active: int  # bytes of rank 0, as the two below: see Memory
    memory_reserved: int
    memory_total: int
    validation_loss: float | None = None
    balance_loss: float | None = (
        None  # if the model has experts: their load; the model says what equal loads give
    )
    mtp_loss: float | None = None  # if the model has this head: cross-entropy of the token after the next
    extra_losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunEnd:
    """How a run, or one session of it, ended.

    Attributes:
        status: "finished" after its last step; "interrupted" by a signal, with the state saved; "failed".
        step: optimizer steps done.
        results: figures of the whole run, as in run.json; empty for a run that failed.
        picture: the picture of the loss; None for a run that failed.
    """

    status: Literal["finished", "interrupted", "failed"]
    step: int
    results: Mapping[str, Any] = field(default_factory=dict)
    picture: Path | None = None


class Sink(Protocol):
    """A place for the metrics of a run: a file, a terminal or a service.

    It has four methods. The first is the function that opens it with the run's configuration and facts: `open` of
    `NamedSink`. There is no method for pictures and results: a run has them once, when it ends, so `close` gets them.
    """

    def step(self, record: StepRecord) -> None:
        """Write one step."""

    def say(self, text: str) -> None:
        """Write one or more lines that the run prints."""

    def close(self, end: RunEnd) -> None:
        """Write how the run ended, and release everything."""


def scalars(record: StepRecord, every: int) -> dict[str, float]:
    """The figures of a step, by the names that TensorBoard and services show.

    Steps that `every` does not divide have only a validation loss, if there is one.
    """
    validation = record.validation_loss
    values = {} if validation is None else {"loss/validation": validation}
    if record.step % every:
        return values
    values["loss/train"] = record.loss
    values |= {f"loss/{name}": loss for name, loss in record.extra_losses.items()}
    others = {name: value for name, value in asdict(record).items() if name != "step" and "loss" not in name}
    return values | {f"step/{name}": value for name, value in others.items() if value is not None}


SAVE_FAILURE = "save_failure"
"""The second key of a line of metrics.jsonl about a checkpoint that could not be written."""
EVENTS = ({"step", SAVE_FAILURE}, {"step", INCIDENT})


@dataclass(frozen=True)
class Incident:
    """Samples that a run has left out: because numbers had gone wrong, or because no token of them is trained.

    Attributes:
        action: "skip": the step was not made. "rewind": the run went back to a checkpoint. "untrained": no step was
            made of global batches without a trained token.
        step: the optimizer step that comes next.
        reason: what was found, in one line.
        samples: those that are left out, [first, stop).
        from_step: optimizer steps done when it went back.
    """

    action: Literal["skip", "rewind", "untrained"]
    step: int
    reason: str
    samples: tuple[int, int]
    from_step: int | None = None

    @property
    def in_words(self) -> str:
        first, stop = self.samples
        left_out = f"samples {first:,} to {stop - 1:,} are left out"
        back = f"the run goes back to step {self.step - 1}; " if self.action == "rewind" else ""
        return f"{self.reason}; {back}{left_out}"


class JsonLines:
    """metrics.jsonl: every step, floats in full precision, every checkpoint that could not be written, incidents."""

    def __init__(
        self, path: Path, steps_done: int, dropped: Path, left_out: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Lines of steps after `steps_done` go to the end of the file `dropped`, without the incidents before the
        checkpoint, which has the samples `left_out`."""
        self.path, self._dropped = path, dropped

        def came_before(incident: Mapping[str, Any]) -> bool:
            first, stop = incident["samples"]
            return any(start <= first and stop <= end for start, end in left_out)

        with writing(path):
            if os.path.isfile(path):  # not a device: a new run does not look for earlier lines
                drop_after(path, steps_done, dropped, came_before)
            self.stream: TextIO = path.open("a" if steps_done else "w", encoding="utf-8")

    def step(self, record: StepRecord) -> None:
        self._write(asdict(record))

    def save_failed(self, step: int, reason: str) -> None:
        self._write({"step": step, SAVE_FAILURE: reason})

    def incident(self, incident: Incident) -> None:
        content = {
            key: value for key, value in asdict(incident).items() if key != "step" and value is not None
        }
        self._write({"step": incident.step, INCIDENT: content})

    def rewind(self, step: int) -> None:
        """Move the lines of later steps away, because the run repeats these steps. Those of rewinds stay."""
        with writing(self.path):
            self.stream.close()
            drop_after(self.path, step, self._dropped, lambda incident: incident["action"] == "rewind")
            self.stream = self.path.open("a", encoding="utf-8")

    def _write(self, content: Mapping[str, Any]) -> None:
        with writing(self.path):
            self.stream.write(json.dumps(content) + "\n")
            self.stream.flush()

    def say(self, text: str) -> None:
        pass

    def close(self, end: RunEnd) -> None:
        with writing(self.path):
            self.stream.close()


def drop_after(
    path: Path, steps_done: int, dropped: Path, keeps: Callable[[Mapping[str, Any]], bool] = lambda _: False
) -> None:
    """Move records of steps after `steps_done` to the end of another file, because the run repeats these steps.

    `keeps` gets the content of each line about an incident of such a step, and says whether it stays.
    """
    if steps_done < 0:
        raise ValueError(f"expected steps_done >= 0, found {steps_done}")
    if steps_done:
        kept, gone = "", ""
        for line in _lines(path):
            if line["step"] <= steps_done or (INCIDENT in line and keeps(line[INCIDENT])):
                kept += json.dumps(line) + "\n"
            else:
                gone += json.dumps(line) + "\n"
    else:
        kept, gone = "", path.read_text(encoding="utf-8", errors="replace")
    if gone:
        with dropped.open("a", encoding="utf-8") as stream:
            stream.write(gone if gone.endswith("\n") else gone + "\n")
            stream.flush()
            os.fsync(stream.fileno())
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(kept)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of the steps in a metrics file. If a crash cut off the last line, it is left out.

    Raises UserError if the file cannot be read, or if a line is no record; the error names the line's number.
    """
    return [line for line in _lines(path) if line.keys() not in EVENTS]


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the metrics: {error.strerror}; restore the file") from None
    except ValueError as error:
        raise UserError(
            f"{path}: cannot read the metrics: {error}; the file is damaged: restore it"
        ) from None
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [_record(line, f"line {number} of {path}") for number, line in enumerate(lines, start=1)]


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"metrics: expected JSON, found something else in {where}") from None
    if not isinstance(record, dict):
        raise UserError(f"metrics: expected a JSON object, found {type(record).__name__} in {where}")
    if record.keys() in EVENTS and type(record["step"]) is int:
        return record
    for column in fields(StepRecord):
        if column.name == "extra_losses":
            continue
        value, optional = record.get(column.name), str(column.type).endswith("| None")
        finite = isinstance(value, int | float) and abs(value) < float("inf")
        if not finite and not (optional and value is None):
            raise UserError(f"metrics: expected a number for {column.name}, found {value!r} in {where}")
    extra = record.get("extra_losses", {})  # records of version 0.1 have none
    if not isinstance(extra, dict) or not all(isinstance(value, int | float) for value in extra.values()):
        raise UserError(
            f"metrics: expected an object of numbers for extra_losses, found {extra!r} in {where}"
        )
    if record["seconds"] <= 0:
        raise UserError(f"metrics: expected seconds > 0, found {record['seconds']} in {where}")
    return record


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, path: Path, steps_done: int, every: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # this import takes a second

        self.path, self.every = path, every
        self.make_writer = SummaryWriter
        with writing(path):
            # An attempt that began with step 1, too, may have left some.
            has_steps = steps_done or any(path.glob("events*"))
            self.writer = SummaryWriter(str(path), purge_step=steps_done + 1 if has_steps else None)

    def step(self, record: StepRecord) -> None:
        with writing(self.path):
            for name, value in scalars(record, self.every).items():
                self.writer.add_scalar(name, value, record.step)

    def rewind(self, step: int) -> None:
        with writing(self.path):
            self.writer.close()
            self.writer = self.make_writer(str(self.path), purge_step=step + 1)

    def say(self, text: str) -> None:
        pass

    def close(self, end: RunEnd) -> None:
        with writing(self.path):
            if end.picture is not None:
                from matplotlib.image import imread

                # Without the transparency, which TensorBoard's encoder does not take.
                self.writer.add_image("loss/curve", imread(end.picture)[..., :3], end.step, dataformats="HWC")
            self.writer.close()


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
        self.every = every
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
        if record.step % self.every == 0:
            self.progress.figures = Figures(figures_of(record))
        self.progress.update(self.task, completed=record.step)
        if record.validation_loss is not None:
            self.say(f"step {record.step}: validation loss {record.validation_loss:.4f}")

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
) -> str:
    """The meaning of each figure of `figures_of` in this run, one line each.

    Args:
        device: the model's device; on the CPU memory is measured in another way.
        validation, norm, mfu: whether steps have these figures.
        auxiliary: names and weights of the losses beside the cross-entropy.
        meanings: what these losses are, by name, as the model says; of others only the weight is known.
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
        "norm": "gradient norm over all ranks, before clipping" if norm else "",
        "tok/s": "tokens per second, all ranks together",
        "FLOP/s": "operations that the model needs, per second and device",
        "MFU": "FLOP/s as a fraction of the device's peak" if mfu else "",
        "mem": memory,
        "data": "share of the step in which the slowest rank waited for data",
    }
    lines = [f"  {name:<10}  {meaning}" for name, meaning in figures.items() if meaning]
    return "\n".join(["figures of a step:", *lines])


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def with_prefix(value: float) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.1f} {prefix}"
    return f"{value:.0f} "
