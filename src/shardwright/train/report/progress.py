"""Messages of a job that is busy for seconds: until its first step, and in long waits. Else it looks stuck.

Loading programs, reading text and building a model take seconds to minutes. Nothing here imports torch, because this
import itself takes seconds and has a message.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

BEGAN_VARIABLE = "SHARDWRIGHT_BEGAN"
"""The time at which a rank's launcher began, by the machine's clock. A rank continues the launcher's seconds."""

EVERY = 2.5
"""Seconds between two lines: nothing is silent for longer than 3."""


def to_stderr(text: str) -> None:
    """Print a notice of a command whose result is on stdout."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def patience(say: Callable[[str], None], text: Callable[[], str]) -> Iterator[None]:
    """Print `text()` every few seconds while the body runs, from another thread. A quick body prints nothing."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(EVERY):
            say(text())

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def patience_about_bytes(
    say: Callable[[str], None], text: Callable[[int], str]
) -> Iterator[Callable[[int], None]]:
    """As `patience`. Yields a function that the work calls with bytes that are done; `text` gets their sum."""
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes

    with patience(say, lambda: text(done)):
        yield progress


class Start:
    """The start of this process's job. Only the process that prints for the user calls `begin`."""

    def __init__(self) -> None:
        self._doing = ""
        self._began = 0.0
        self._speaking: ExitStack | None = None
        self._repeats = True
        self._printed = ""

    def begin(self, doing: str) -> None:
        """From now on print the current action: on a terminal every few seconds in one line, elsewhere once. A quick
        start prints nothing."""
        if self._speaking is None:
            self._began = float(os.environ.get(BEGAN_VARIABLE, time.monotonic()))
            self._speaking, self._printed = ExitStack(), ""
            self._repeats = sys.stdout.isatty()
            self._speaking.enter_context(patience(self._print, self._line))
        self.doing(doing)

    @property
    def is_speaking(self) -> bool:
        return self._speaking is not None

    def doing(self, text: str) -> None:
        """Set the current action. If the start is already slow, print it at once."""
        changed, self._doing = text != self._doing, text
        if changed and self.is_speaking and time.monotonic() - self._began >= EVERY:
            self._print(self._line())

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for the ranks."""
        return {BEGAN_VARIABLE: str(self._began)} if self.is_speaking else {}

    @contextmanager
    def left_to_others(self) -> Iterator[None]:
        """Print nothing inside the context, because other code prints there."""
        before, self._doing = self._doing, ""
        self._clear()
        try:
            yield
        finally:
            self._doing = before

    def end(self) -> None:
        if self._speaking is not None:
            speaking, self._speaking = self._speaking, None
            speaking.close()
            self._clear()

    def _line(self) -> str:
        """Empty if there is nothing new to say to a file or a pipe."""
        if not self._doing or (self._printed == self._doing and not self._repeats):
            return ""
        self._printed = self._doing
        return f"{self._doing} ({time.monotonic() - self._began:.0f} s)"

    def _print(self, text: str) -> None:
        if not text:
            return
        # On a terminal the cursor goes back to the start of the line, so that the next line, also one of other code,
        # takes its place.
        _write(f"{text[: shutil.get_terminal_size().columns - 1]}\033[K\r" if self._repeats else f"{text}\n")

    def _clear(self) -> None:
        """Remove the line of a terminal before other code prints."""
        if self._printed and self._repeats:
            _write("\033[K")
            self._printed = ""


def _write(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except (OSError, ValueError):
        pass  # Nobody reads the output any more. The job's own output raises this error, too.


START = Start()
"""A process starts one job at a time."""
