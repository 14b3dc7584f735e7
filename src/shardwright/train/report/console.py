"""Steps on the terminal: a progress bar, or plain lines for logs and pipes, and the meaning of each figure.

Which figures a step has is in `config.catalog.figures`. Nothing here measures or computes them.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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

from shardwright.train.config.catalog.figures import RunFacts, meanings_of, texts_of
from shardwright.train.config.catalog.records import RunEnd, RunSink, StepRecord, of_sets


class Lines(RunSink):
    """Plain lines for logs and pipes. Steps up to `printed` were printed before a restart, into the same log."""

    def __init__(self, steps: int, every: int, printed: int = 0) -> None:
        self.steps, self.every, self._printed = steps, every, printed
        self._explained = False

    def step(self, record: StepRecord) -> None:
        if record.step <= self._printed:
            self._explain(record.step)
        elif record.step % self.every == 0 or record.step == self.steps or record.validation_loss is not None:
            print(
                f"step {record.step:>{len(str(self.steps))}}/{self.steps}  {'  '.join(texts_of(record))}",
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


class Bar(RunSink):
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
            self.progress.figures = Figures(texts_of(record))
        self.progress.update(self.task, completed=record.step)
        if record.validation_loss is not None:
            others = {**of_sets(record.validation_losses), **record.validation_metrics}
            metrics = "".join(f", {name} {value:.4f}" for name, value in others.items())
            self.say(f"step {record.step}: validation loss {record.validation_loss:.4f}{metrics}")

    def say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)

    def close(self, end: RunEnd) -> None:
        self.progress.stop()


def lines_of(parts: Sequence[str], width: int) -> list[str]:
    """Return the parts, two spaces between them, on lines of at most `width` columns where each part fits in one."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def explain_figures(run: RunFacts) -> str:
    """Return the meaning of each figure of a step in this run, on lines for a terminal."""
    entries = (
        textwrap.wrap(
            f"{name:<10}  {meaning}",
            80,
            initial_indent="  ",
            subsequent_indent=" " * 14,
            break_long_words=False,
        )
        for name, meaning in meanings_of(run).items()
    )
    return "\n".join(["figures of a step:", *itertools.chain(*entries)])
