"""A rank's answers to signals, at once: the first rank prints a line, and a second signal ends the rank.

All of it runs in the thread that reads signals, also while the main thread waits in a collective.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from shardwright.train.config import Config
from shardwright.train.launch.job_end import JobEnd, stopped_by
from shardwright.train.launch.resume import to_continue
from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.world import World
from shardwright.train.run.deadlines import SECONDS_FOR_FIRST
from shardwright.train.run.exits import DONE, TRY_AGAIN, Outcome, is_saved
from shardwright.train.run.record import is_finished


class SignalAnswers:
    """The answers of one rank."""

    def __init__(self, config: Config, job_end: JobEnd, world: World) -> None:
        self.job_end, self.world = job_end, world
        self._say: Callable[[str], None] = print
        self._saves = True  # False once the run is at its end
        self._step: Callable[[], int] = lambda: 0
        # Our launcher knows the time and ends the ranks itself, also one that does not answer.
        self._seconds = config.fault.save_seconds if job_end.speaks else 0.0
        self._number = signal.SIGTERM

    def follow(self, say: Callable[[str], None], step: Callable[[], int]) -> None:
        """Answer through `say` from here on. A signal ends the run after the step that `step()` is by then."""
        self._say, self._step = say, step

    def reach_end(self) -> None:
        """Say from here on that the run is at its end: nothing is left to save."""
        self._saves = False

    def request(self) -> StopRequest:
        return StopRequest(self._noted, self._leave, self._seconds, ignores_later=True)

    def _noted(self, number: int) -> None:
        self._number = signal.Signals(number)
        if self.world.is_first:
            doing = f"saving after step {self._step()}" if self._saves else "the run is at its end"
            try:
                self._say(f"{self._number.name} received; {doing}")
            except (OSError, ValueError):
                pass  # nobody reads the output any more

    def _leave(self, number: int | None) -> None:
        """End the process: `number` is a second signal, None if the time to save has passed."""
        status = TRY_AGAIN
        try:
            if self.job_end.speaks and not self.world.is_first:
                time.sleep(SECONDS_FOR_FIRST)
            end = self._end(number)
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

    def _end(self, number: int | None) -> Outcome:
        folder = self.job_end.folder
        if not self._saves and is_finished(folder):
            return Outcome(DONE, "done")
        if is_saved(folder):
            return stopped_by(self._number)
        if number is not None:
            return stopped_by(self._number, unsaved="a second signal")
        why = f"the checkpoint took longer than fault.save_seconds = {self._seconds:g}"
        return replace(stopped_by(self._number, unsaved=why), status=TRY_AGAIN)
