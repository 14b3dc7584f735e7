"""A sink of `[log] sinks` in a thread, so that a sink that hangs does not hang the run.

All calls of a sink, its opening included, run in one thread in their order. Nothing here imports torch.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright.train.run import deadlines

if TYPE_CHECKING:
    from shardwright.train.config.catalog.records import RunEnd, Sink, StepRecord

CLOSE_SECONDS = 30.0
"""The longest time that the end of a run waits for a sink: for the calls before, and for `close`."""
MOST_CALLS = 10_000
"""Calls that may wait for a sink. More of them would fill the memory of a long run."""
PREFIX = "sink "


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[object, ...]
    is_last: bool
    outcome: Future[Any] = field(default_factory=Future)


class SlowSink(Exception):
    """A sink does not answer."""


class SinkThread:
    """A sink whose calls run in a thread of its own.

    A call waits for the sink at most `patience` seconds. While an earlier call is still running, a call does not wait.
    An error that the sink raised later is raised by the next call.

    Args:
        name: its name in `[log] sinks`.
        open: makes the sink. The constructor waits for it and raises its error, or SlowSink after
            `deadlines.OPENING_SECONDS`.
        patience: seconds.

    Attributes:
        failed_step: the step whose call raised an error; None before that.
    """

    def __init__(self, name: str, open: Callable[[], Sink], patience: float) -> None:
        self.name, self.patience = name, patience
        self.failed_step: int | None = None
        self._step = 0
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._pending: deque[tuple[int, Future[Any]]] = deque()
        self._thread = threading.Thread(
            target=_run_calls, args=(self._calls,), name=PREFIX + name, daemon=True
        )
        self._thread.start()
        opening = self._put(open)
        try:
            wait([opening], deadlines.OPENING_SECONDS)
            if not opening.done():
                raise SlowSink(f"it did not open within {deadlines.OPENING_SECONDS:g} s")
            self._sink: Sink = opening.result()
        except BaseException:
            self._calls.put(None)
            raise

    def step(self, record: StepRecord) -> None:
        self._step = record.step
        self._call(self._sink.step, record)

    def say(self, text: str) -> None:
        self._call(self._sink.say, text)

    def tasks(self, step: int, values: Mapping[str, float]) -> None:
        """For a sink with a method `tasks`; others get the line about them alone."""
        if callable(tasks := getattr(self._sink, "tasks", None)):
            self._call(tasks, step, values)

    def rewind(self, step: int) -> None:
        """For a sink with a method `rewind`; others get the same steps once more."""
        if callable(rewind := getattr(self._sink, "rewind", None)):
            self._call(rewind, step)

    def close(self, end: RunEnd, seconds: float) -> None:
        """Close the sink. Raises the first error that the sink raised, or SlowSink after `seconds`."""
        closing = self._put(self._sink.close, end, is_last=True)
        self._calls.put(None)
        wait([closing], seconds)
        self._raise_errors()
        if not closing.done():
            calls = f", {len(self._pending)} calls before it are waiting" if self._pending else ""
            raise SlowSink(f"the sink did not close within {seconds:g} s{calls}")
        closing.result()

    def _call(self, function: Callable[..., Any], *arguments: object) -> None:
        self._raise_errors()
        if len(self._pending) >= MOST_CALLS:
            raise SlowSink(f"{MOST_CALLS} calls are waiting for the sink")
        is_waiting = bool(self._pending)
        call = self._put(function, *arguments)
        self._pending.append((self._step, call))
        if self.patience and not is_waiting:
            wait([call], self.patience)
        self._raise_errors()

    def _put(self, function: Callable[..., Any], *arguments: object, is_last: bool = False) -> Future[Any]:
        call = _Call(function, arguments, is_last)
        self._calls.put(call)
        return call.outcome

    def _raise_errors(self) -> None:
        while self._pending and self._pending[0][1].done():
            step, call = self._pending.popleft()
            error = call.exception()
            if error is not None:
                self.failed_step = step
                self._pending.clear()
                raise error


def _run_calls(calls: queue.SimpleQueue[_Call | None]) -> None:
    """The thread: run calls until there is a None. After a call that failed, only the last one runs."""
    failed = False
    while (call := calls.get()) is not None:
        if failed and not call.is_last:
            continue
        try:
            call.outcome.set_result(call.function(*call.arguments))
        except Exception as error:
            failed = True
            call.outcome.set_exception(error)
        except BaseException as error:  # A sink that calls sys.exit must not end the run.
            failed = True
            call.outcome.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def leave_if_stuck(status: int) -> None:
    """End this process with `status` if a sink did not close. Else return.

    Python waits at its end for the threads and the functions that a package registered. A stuck package would hang
    here again.
    """
    if any(thread.name.startswith(PREFIX) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
