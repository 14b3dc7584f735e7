"""The sinks of a run as one: records, lines and the end go to all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from shardwright.engine.extend import in_words
from shardwright.train.config.catalog.records import Incident, RunEnd, RunSink, StepRecord
from shardwright.train.report import sink_thread
from shardwright.train.report.sink_thread import SinkThread, SlowSink
from shardwright.train.run import deadlines
from shardwright.train.run.evaluations import metric_in_words, scalars_of


class Reporter:
    """Passes records and lines to all sinks of a run. Only the first rank has sinks.

    Args:
        sinks: the run's own files and terminal. An error of one ends the run.
        added: the sinks of `[log] sinks`, by name. If one raises an error or hangs, it is not called again; the run
            goes on.
        steps_done: optimizer steps before the first record.

    Attributes:
        stopped: in words, for each added sink that raised an error or hung, the step and the error.
        failed_saves: in words, for each checkpoint that could not be written, the step and the error.
        wrong_figures: in words, by the name of each figure that was nan or infinite, the first time that it was.
    """

    def __init__(
        self, sinks: Sequence[RunSink], added: Mapping[str, SinkThread] | None = None, steps_done: int = 0
    ) -> None:
        self.sinks = list(sinks)
        self.added = dict(added or {})
        self.last_step = steps_done
        self.stopped: list[str] = []
        self.failed_saves: list[str] = []
        self.wrong_figures: dict[str, str] = {}

    def step(self, record: StepRecord) -> None:
        self.last_step = record.step
        for sink in self.sinks:
            sink.step(record)
        self._call_added(lambda sink: sink.step(record))

    def unit_norms(self, step: int, norms: Mapping[str, float], left_out: bool = False) -> None:
        """Record gradient norms by unit in the run's own file. Sinks of `[log] sinks` do not get them."""
        for sink in self.sinks:
            sink.unit_norms(step, norms, left_out)

    def say(self, text: str) -> None:
        for sink in self.sinks:
            sink.say(text)
        self._call_added(lambda sink: sink.say(text))

    def say_at_once(self, text: str) -> None:
        """Print lines at once, from any thread. Sinks of `[log] sinks` do not get them."""
        for sink in list(self.sinks):
            sink.say(text)

    def save_failed(self, step: int, reason: str) -> None:
        """Record that a checkpoint could not be written and that the run goes on."""
        self.failed_saves.append(f"checkpoint of step {step}: {reason}")
        for sink in self.sinks:
            sink.save_failed(step, reason)
        self.say(f"warning: {self.failed_saves[-1]}. The run goes on")

    def not_finite(self, figure: str, text: str) -> None:
        """Warn that a figure is nan or infinite, once in a session."""
        if self.wrong_figures.setdefault(figure, text) is text:
            self.say(
                f"warning: {text}. metrics.jsonl has null for it. Later steps do not repeat this warning"
            )

    def incident(self, incident: Incident, quiet: bool = False) -> None:
        """Record that samples were left out, and that the run goes on. `quiet`: only in metrics.jsonl."""
        for sink in self.sinks:
            sink.incident(incident)
        if not quiet:
            self.say(f"warning: {incident.in_words}")

    def rewind(self, step: int) -> None:
        """The run goes on after `step`, so later steps come again."""
        self.last_step = step
        for sink in self.sinks:
            sink.rewind(step)
        self._call_added(lambda sink: sink.rewind(step))

    def tasks(self, step: int, tasks: Mapping[str, Any]) -> None:
        """Report the results of tasks on the checkpoint of a step, which may be long ago."""
        figures = [
            f"{name} {metric} {metric_in_words(figure)}"
            for name, task in tasks.items()
            for metric, figure in task["metrics"].items()
        ]
        self.say(f"tasks of step {step}: {', '.join(figures)}")
        self._call_added(lambda sink: sink.tasks(step, scalars_of(tasks)))

    def _call_added(self, call: Callable[[SinkThread], None]) -> None:
        """Call the sinks of `[log] sinks`; those that raise an error are stopped."""
        for name, sink in list(self.added.items()):
            try:
                call(sink)
            except Exception as error:
                self._stop(name, error)

    def not_opened(self, name: str, error: SlowSink) -> None:
        """Warn that an added sink did not open in time, so that the run goes on without it."""
        self._warn(
            f"sink {name!r} is not used: {error}",
            "The run goes on without this sink; metrics.jsonl has all steps",
        )

    def _stop(self, name: str, error: Exception) -> None:
        """Close an added sink that raised an error, and warn."""
        sink = self.added.pop(name, None)
        if sink is None:
            return  # its error was met in a warning about another sink
        try:
            sink.close(RunEnd("failed", self.last_step), deadlines.HURRIED_SECONDS)
        except Exception:
            pass  # its first error is the one to report
        self._warn_stopped(name, sink, error)

    def _warn_stopped(self, name: str, sink: SinkThread, error: Exception) -> None:
        step = self.last_step if sink.failed_step is None else sink.failed_step
        self._warn(
            f"sink {name!r} stopped at step {step}: it raised {in_words(error)}",
            "The run goes on without this sink; metrics.jsonl has all steps",
        )

    def _warn(self, stop: str, advice: str) -> None:
        self.stopped.append(stop)
        self.say(f"warning: {stop}. {advice}")

    def close(self, end: RunEnd) -> None:
        """Close the sinks of `[log] sinks`, then the run's own. A second call does nothing."""
        hurried = end.status == "failed"
        for name in list(self.added):
            sink = self.added.pop(name)
            try:
                sink.close(end, deadlines.HURRIED_SECONDS if hurried else sink_thread.CLOSE_SECONDS)
            except Exception as error:
                if sink.failed_step is not None:
                    self._warn_stopped(name, sink, error)
                    continue
                self._warn(
                    f"sink {name!r} raised {in_words(error)} when it was closed after step {self.last_step}",
                    "Its last records may be missing; metrics.jsonl has all steps",
                )
        sinks, self.sinks = self.sinks, []
        problem: Exception | None = None
        for own in sinks:
            try:
                own.close(end)
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close what is still open: the run failed, or it has only sinks that do not use its end."""
        try:
            self.close(RunEnd("finished" if error is None else "failed", self.last_step))
        except Exception:
            if error is None:  # else the error on its way is the one that matters
                raise
