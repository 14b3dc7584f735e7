"""Signals that ask a job to save and end. They are stored until the loop reads them.

This file does not decide after which step the ranks end; the loop does. A handler does nothing: a thread reads the
numbers of signals, so that a rank answers at once, also while its main thread waits in a collective.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask for the same. SLURM sends SIGUSR1 if `--signal` says so."""
TWICE = 1.0
"""Seconds after a signal from which on another one counts. A terminal's Ctrl-C may arrive twice, once directly and once
from the launcher."""


def catchable() -> list[signal.Signals]:
    """The signals of `SIGNALS` that this process does not ignore: nohup ignores SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler. With it the number of the signal goes to the thread that reads them."""


def status_of_signal(number: int) -> int:
    """The status of a process that left because of this signal: 130 for SIGINT, 143 for the others."""
    return 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


_before_end: dict[int, Any] = {}
"""The handlers of before a run that has ended well. Its signals are ignored until `restore_handlers`."""


def _leave_to_rest(before: dict[int, Any], ended_well: bool) -> None:
    """Ignore signals from here to the end of the process if the run has `ended_well`, else handle them as `before`.

    Nothing is left then that a signal could stop, and it would kill a process that has done all.
    """
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN if ended_well else handler)
        if ended_well:
            _before_end.setdefault(number, handler)


def restore_handlers() -> None:
    """Handle signals as before the run, in a process that goes on after it."""
    while _before_end and threading.current_thread() is threading.main_thread():
        number, handler = _before_end.popitem()
        signal.signal(number, handler)


def _exit(number: int | None) -> None:
    os._exit(status_of_signal(number or signal.SIGTERM))


class Signals:
    """The signals that a launcher gets, over all attempts of its job. A handler only stores them.

    After the context they are ignored, unless an error flies.
    """

    def __init__(self) -> None:
        self.received: list[tuple[int, float]] = []  #: number and time of each
        self._before: dict[int, Any] = {}

    @property
    def first(self) -> int | None:
        return self.received[0][0] if self.received else None

    @property
    def asked_twice(self) -> bool:
        return bool(self.received) and self.received[-1][1] - self.received[0][1] > TWICE

    def seconds_since_first(self) -> float:
        return time.monotonic() - self.received[0][1] if self.received else 0.0

    def _store(self, number: int, frame: FrameType | None) -> None:
        self.received.append((number, time.monotonic()))

    def __enter__(self) -> Signals:
        restore_handlers()
        for number in catchable():
            self._before[number] = signal.signal(number, self._store)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _leave_to_rest(self._before, kind is None)


class StopRequest:
    """Stores the first signal, which the loop reads between steps.

    Args:
        noted: gets the first signal, at once, in a thread of its own.
        leave: gets a second signal, or None when `save_seconds` have passed since the first one. It ends the process.
        save_seconds: 0 for no limit.
        ignores_later: ignore signals after the context, unless an error flies. `restore_handlers` is for a process that
            goes on.
    """

    def __init__(
        self,
        noted: Callable[[int], None] | None = None,
        leave: Callable[[int | None], None] = _exit,
        save_seconds: float = 0.0,
        ignores_later: bool = False,
    ) -> None:
        self._ignores_later = ignores_later
        self.signal_number: int | None = None
        self._noted, self._leave, self._save_seconds = noted, leave, save_seconds
        self._first = 0.0
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return (
                self  # only the main thread may have handlers; the framework that runs this one has its own
            )
        restore_handlers()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in catchable():
            self._before[number] = signal.signal(number, _nothing)
        threading.Thread(target=self._listen, args=(self._pipe[0],), daemon=True, name="signals").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pipe is None:
            return
        _leave_to_rest(self._before, self._ignores_later and kind is None)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._pipe[1])  # ends the thread
        self._pipe = None

    def _listen(self, numbers: int) -> None:
        waits = select.poll()  # select.select takes no file number above 1023
        waits.register(numbers, select.POLLIN)
        try:
            while True:
                if not waits.poll(self._patience()):
                    self._leave(None)
                elif not (byte := os.read(numbers, 1)):
                    return
                elif byte[0] in SIGNALS:
                    self._note(byte[0])
        finally:
            os.close(numbers)

    def _patience(self) -> float | None:
        """Milliseconds until the process leaves without having saved; None if nothing asks it to."""
        if self.signal_number is None or not self._save_seconds:
            return None
        return 1000 * max(0.0, self._first + self._save_seconds - time.monotonic())

    def _note(self, number: int) -> None:
        if self.signal_number is None:
            self._first = time.monotonic()
            self.signal_number = number
            if self._noted is not None:
                self._noted(number)
        elif time.monotonic() - self._first > TWICE:
            self._leave(number)
