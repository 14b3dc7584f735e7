"""A rank's answers to signals, at once: the first rank prints a line, and a second signal ends the rank.

All of it runs in the thread that reads signals, also while the main thread waits in a collective.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwright.train.launch.job_end import JobEnd, stopped_by
from shardwright.train.launch.resume import to_continue
from shardwright.train.launch.signals import StopRequest, answered_signals
from shardwright.train.parallel.world import World
from shardwright.train.run.deadlines import SECONDS_FOR_FIRST
from shardwright.train.run.exits import DONE, TRY_AGAIN, Outcome, is_saved
from shardwright.train.run.record import is_finished


class SignalAnswers:
    """The answers of one rank."""

    def __init__(self, steps: int, save_seconds: float, job_end: JobEnd, world: World) -> None:
        """`steps`: of the run. `save_seconds`: the time that a save may take after a signal."""
        self.job_end, self.world = job_end, world
        self._say: Callable[[str], None] = print
        self._saves = True  # False once the run is at its end
        self._steps = steps
        # Our launcher knows the time and ends the ranks itself, also one that does not answer.
        self._request = StopRequest(save_seconds if job_end.speaks else 0.0)

    def follow(self, say: Callable[[str], None]) -> None:
        """Answer through `say` from here on."""
        self._say = say

    def reach_end(self) -> None:
        """Say from here on that the run is at its end: nothing is left to save."""
        self._saves = False

    @contextmanager
    def request(self) -> Iterator[StopRequest]:
        """The signals that come in this context."""
        with answered_signals(self._request, self._noted, self._leave):
            yield self._request

    def _noted(self, number: int) -> None:
        if self.world.is_first:
            step = min(self._request.last_step, self._steps)
            doing = f"saving after step {step}" if self._saves else "the run is at its end"
            try:
                self._say(f"{signal.Signals(number).name} received; {doing}")
            except (OSError, ValueError):
                pass  # nobody reads the output any more

    def _leave(self) -> None:
        """End the process, because there is no more time to save."""
        status, hurry, late = TRY_AGAIN, self._request.hurry, self._request.is_late
        try:
            if self.job_end.speaks and not self.world.is_first:
                time.sleep(SECONDS_FOR_FIRST)
            end = self._end(hurry, late)
            if self.world.is_first:
                self._report(end)
            status = end.status
        finally:
            os._exit(status)  # also if the terminal has gone, for example

    def _report(self, end: Outcome) -> None:
        self.job_end.write(end)
        if self.job_end.speaks and end.status != DONE:
            lines = [end.reason, *to_continue(self.job_end.folder, self.world.size)]
            print("\n".join(lines), file=sys.stderr, flush=True)

    def _end(self, hurry: str, late: bool) -> Outcome:
        number = self._request.signal_number
        assert number is not None
        folder = self.job_end.folder
        if not self._saves and is_finished(folder):
            return Outcome(DONE, "done")
        if is_saved(folder):
            return stopped_by(number)
        return stopped_by(number, unsaved=hurry, late=late)
