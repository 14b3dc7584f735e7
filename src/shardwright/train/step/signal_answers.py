"""What a rank does at once after a signal: the first rank prints a line, and a second signal ends the rank.

All of it runs in the thread that reads signals, also while the main thread waits in a collective.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from shardwright.train.config import Config
from shardwright.train.launch.attempts import record_end
from shardwright.train.launch.environment import LAUNCHER_VARIABLE
from shardwright.train.launch.resume import to_continue
from shardwright.train.launch.signals import StopRequest, status_of_signal
from shardwright.train.parallel.world import World
from shardwright.train.run.exits import DONE, TRY_AGAIN, End, is_saved, write_exit
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.record import close_session, is_finished

SECONDS_FOR_FIRST = 2.0
"""Seconds that other ranks leave to the first one, which reports: if they end, it loses contact."""


class Answers:
    """The answers of one rank."""

    def __init__(self, config: Config, folder: RunFolder, world: World, attempt: int) -> None:
        self.folder, self.world, self.attempt = folder, world, attempt
        self.say: Callable[[str], None] = print
        self.saves = True  #: after `step`; False once the run is at its end
        self.step: Callable[[], int] = lambda: 0  #: after which the run saves and ends if a signal comes now
        self._launched = LAUNCHER_VARIABLE in os.environ
        # Our launcher knows the time and ends the ranks itself, also one that does not answer.
        self._seconds = 0.0 if self._launched else config.fault.save_seconds
        self._number = signal.SIGTERM

    def request(self) -> StopRequest:
        return StopRequest(self._noted, self._leave, self._seconds, ignores_later=True)

    def _noted(self, number: int) -> None:
        self._number = signal.Signals(number)
        if self.world.is_first:
            doing = f"saving after step {self.step()}" if self.saves else "the run is at its end"
            try:
                self.say(f"{self._number.name} received; {doing}")
            except (OSError, ValueError):
                pass  # nobody reads the output any more

    def _leave(self, number: int | None) -> None:
        """End the process: `number` is a second signal, None if the time to save has passed."""
        if not self.world.is_first and not self._launched:
            time.sleep(SECONDS_FOR_FIRST)
            os._exit(DONE if self._is_done() else TRY_AGAIN)
        status = status_of_signal(number or self._number) if self._launched else TRY_AGAIN
        try:
            if self.world.is_first:
                status = self._record(self._end(number))
        finally:
            os._exit(status)  # also if the terminal has gone, for example

    def _record(self, end: End) -> int:
        """Record the end, as far as our launcher does not, and return its status."""
        close_session(self.folder, end)
        if not self._launched:
            record_end(self.folder, end)
            write_exit(self.folder, end, self.attempt)
        if not self._launched and end.status != DONE:
            lines = [end.reason, *to_continue(self.folder, self.world.size)]
            print("\n".join(lines), file=sys.stderr, flush=True)
        return end.status

    def _is_done(self) -> bool:
        """Whether this session has written that it is finished."""
        return not self.saves and is_finished(self.folder)

    def _end(self, number: int | None) -> End:
        if self._is_done():
            return End(DONE, "done")
        status = status_of_signal(self._number)
        if is_saved(self.folder):
            return End(status, f"stopped by {self._number.name}; the state is saved")
        if number is None:
            why = f"the checkpoint took longer than fault.save_seconds = {self._seconds:g}"
            return End(TRY_AGAIN, f"stopped by {self._number.name} without saving: {why}")
        return End(status, f"stopped by {self._number.name} without saving: a second signal")
