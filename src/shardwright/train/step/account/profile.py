"""The trace of the steps of `[profile] steps` on this rank, with ranges for steps and their parts.

``shardwright.watching.profiling`` writes the trace. Nothing here measures: `clock.py` beside this file does.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from torch.profiler import record_function

from shardwright.engine import heartbeat
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.account.clock import Part
from shardwright.train.step.trainer import Trainer
from shardwright.watching import Profiler


class StepProfile:
    """Traces this rank in the steps of `[profile] steps`. If the profiler fails, the run goes on.

    A session has one trace at most. It also ends if the run goes back before the first of these steps.
    """

    def __init__(self, trainer: Trainer, folder: RunFolder, reporter: Reporter) -> None:
        config, self._rank = trainer.config.profile, trainer.world.rank
        self._trainer, self._folder, self._reporter = trainer, folder, reporter
        self._first, self._last = config.steps or (0, 0)
        self._is_chosen = config.ranks == "all" or self._rank in config.ranks
        self._reached = 0  #: the last step that has begun in the trace
        self._has_ended = False
        self._profiler: Profiler | None = None
        self._step: Any = None  #: the range of the running step
        self._part: Any = None  #: the range of its running part
        if config.steps and trainer.position.step >= self._first:
            reporter.say(f"profile.steps: step {self._first} is done already, so no step is traced")

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def before_step(self, step: int) -> None:
        """Begin the trace, if it begins with this step."""
        if self._profiler is None and step == self._first:
            path = self._folder.profile(self._first, self._last, self._rank)
            self._profiler = Profiler(
                self._trainer.world.device, lambda _: path, runs=self._is_chosen, warn=_warn
            )
            heartbeat.be_patient()  # to start takes seconds
            self._profiler.__enter__()
            if self._profiler.runs:
                self._trainer.clock.follow = self._begin_part
        if self._profiler is None or self._has_ended:
            return
        if step < self._first:
            self._stop()
            return
        self._reached = max(self._reached, step)
        if self._profiler.runs:
            self._step = _opened(f"step {step}")

    def after_step(self, step: int) -> None:
        """A step has ended, or was left out. End the trace after the last step."""
        self._end_ranges()
        if step >= self._last:
            self._stop()

    def _begin_part(self, part: Part) -> None:
        if self._part is not None:
            self._part.__exit__(None, None, None)
        self._part = _opened(part)

    def _end_ranges(self) -> None:
        for each in (self._part, self._step):
            if each is not None:
                each.__exit__(None, None, None)
        self._part = self._step = None

    def _stop(self) -> None:
        profiler = self._profiler
        if profiler is None or self._has_ended:
            return
        self._has_ended = True
        self._trainer.clock.follow = None
        self._end_ranges()
        if profiler.runs:
            heartbeat.be_patient()  # to write takes seconds, and the other ranks wait in their next step
            profiler.stop()
        if profiler.files or not self._is_chosen:
            self._say_path()

    def _say_path(self) -> None:
        """Only the first rank has a reporter that prints."""
        path = self._folder.profile(self._first, self._last, self._rank)
        ranks = self._trainer.config.profile.ranks
        where = path if ranks == (self._rank,) else path.parent
        short = f", as it ended before step {self._last}" if self._reached < self._last else ""
        self._reporter.say(
            f"trace of steps {self._first} to {self._reached}{short}: {where}; open it at ui.perfetto.dev"
        )


def _opened(name: str) -> Any:
    opened = record_function(name)
    opened.__enter__()
    return opened


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
