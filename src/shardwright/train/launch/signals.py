"""Signals that ask a job to save and end. `StopRequest` alone knows who asks, and how long the process may save.

A rank's loop reads the request between steps; its thread answers at once, also while the main thread waits in a
collective. The launcher passes signals on. Which ranks it kills for other reasons, such as a hang, is in `launcher`.
This file does not decide after which step the ranks end; the loop does.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask for the same. SLURM sends SIGUSR1 if `--signal` says so."""
TWICE = 1.0
"""Seconds after a signal from which on another one counts. A terminal's Ctrl-C may arrive twice, once directly and once
from the launcher."""


def catchable() -> list[signal.Signals]:
    """Return the signals of `SIGNALS` that this process does not ignore: nohup ignores SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler. With it the number of the signal goes to the thread that reads them."""


def status_of_signal(number: int) -> int:
    """Return the status of a process that left because of this signal: 130 for SIGINT, 143 for the others."""
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


class StopRequest:
    """A request to save and end, by signals: the first of them, and the reason to end without saving.

    Args:
        save_seconds: for a save, from the first signal; 0 for no limit.

    Attributes:
        received: number and time of each signal.
        last_step: the step after which a signal that comes now ends the run, see `take_effect_after`.
    """

    def __init__(self, save_seconds: float = 0.0) -> None:
        self.save_seconds = save_seconds
        self.received: list[tuple[int, float]] = []
        self.last_step = 0

    def take_effect_after(self, step: int) -> None:
        """From here on a signal ends the run after this step. Called by the steps alone."""
        self.last_step = step

    def note(self, number: int) -> None:
        self.received.append((number, time.monotonic()))

    @property
    def signal_number(self) -> int | None:
        """The first signal; None if nothing asks the process to end."""
        return self.received[0][0] if self.received else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds in which the process may still save; None without a signal or a limit."""
        if not self.received or not self.save_seconds:
            return None
        return max(0.0, self.received[0][1] + self.save_seconds - time.monotonic())

    @property
    def is_late(self) -> bool:
        """Whether the time to save has passed."""
        return self.seconds_left == 0

    @property
    def hurry(self) -> str:
        """The reason to end without saving, in words. Empty while the process may save."""
        if self.is_late:
            return f"the checkpoint took longer than fault.save_seconds = {self.save_seconds:g}"
        asked_twice = bool(self.received) and self.received[-1][1] - self.received[0][1] > TWICE
        return "a second signal" if asked_twice else ""


@contextmanager
def noted_signals(request: StopRequest) -> Iterator[None]:
    """Store signals in `request`, and do nothing else: for the launcher, which looks at it.

    After the context signals are ignored, unless an error flies.
    """
    restore_handlers()
    with _handlers(lambda number, frame: request.note(number)):
        yield


@contextmanager
def answered_signals(
    request: StopRequest, noted: Callable[[int], None], leave: Callable[[], None]
) -> Iterator[None]:
    """Store signals in `request`, and answer them in a thread: for a rank. After the context signals are ignored,
    unless an error flies.

    Only the main thread may have handlers. In another one nothing happens: the framework that runs it has its own.

    Args:
        request: the request.
        noted: gets the first signal, at once.
        leave: called when there is a reason to end without saving. It ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    restore_handlers()
    numbers, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    wakeup_before = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    arguments = numbers, request, noted, leave
    try:
        with _handlers(_nothing):
            threading.Thread(target=_answer, args=arguments, daemon=True, name="signals").start()
            yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        os.close(wakeup)  # ends the thread


@contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals so. After the context they are ignored, unless an error flies."""
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in catchable()}
    ended_well = False
    try:
        yield
        ended_well = True
    finally:
        _leave_to_rest(before, ended_well)


def _answer(
    numbers: int, request: StopRequest, noted: Callable[[int], None], leave: Callable[[], None]
) -> None:
    """The thread: read the numbers of signals from the file `numbers`, until it is closed."""
    waits = select.poll()  # select.select takes no file number above 1023
    waits.register(numbers, select.POLLIN)
    try:
        while True:
            seconds = request.seconds_left
            if waits.poll(None if seconds is None else 1000 * seconds):
                if not (byte := os.read(numbers, 1)):
                    return
                if byte[0] in SIGNALS:
                    request.note(byte[0])
                    if len(request.received) == 1:
                        noted(byte[0])
            if request.hurry:
                leave()
    finally:
        os.close(numbers)
