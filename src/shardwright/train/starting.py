"""What a job says of itself until its first step: loading programs, reading text and building a model take seconds to
minutes, in which it must not look stuck.

Nothing here imports torch: importing it is one of the things to be said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shardwright.train import patience

BEGAN_VARIABLE = "SHARDWRIGHT_BEGAN"
"""When the launcher of a rank began, by the clock that all processes of the machine share: so the seconds go on."""


class Start:
    """The start of this process's job. Only the process that speaks to the user begins it; others say nothing."""

    def __init__(self) -> None:
        self._doing = ""
        self._began = 0.0
        self._speaking: ExitStack | None = None

    def begin(self, doing: str) -> None:
        """From now on say every few seconds what is being done. A quick start says nothing."""
        if self._speaking is None:
            self._began = float(os.environ.get(BEGAN_VARIABLE, time.monotonic()))
            self._speaking = ExitStack()
            self._speaking.enter_context(patience.patience(_print, self._line))
        self.doing(doing)

    @property
    def is_speaking(self) -> bool:
        return self._speaking is not None

    def doing(self, text: str) -> None:
        """What begins now. A start that is slow already says so at once."""
        changed, self._doing = text != self._doing, text
        if changed and self.is_speaking and time.monotonic() - self._began >= patience.EVERY:
            _print(self._line())

    @property
    def variables(self) -> dict[str, str]:
        """For the environment of ranks."""
        return {BEGAN_VARIABLE: str(self._began)} if self.is_speaking else {}

    @contextmanager
    def left_to_others(self) -> Iterator[None]:
        """Within it somebody else says what is being done."""
        before, self._doing = self._doing, ""
        yield
        self._doing = before

    def end(self) -> None:
        if self._speaking is not None:
            speaking, self._speaking = self._speaking, None
            speaking.close()

    def _line(self) -> str:
        return self._doing and f"{self._doing} ({time.monotonic() - self._began:.0f} s)"


def _print(text: str) -> None:
    try:
        if text:
            print(text, flush=True)
    except (OSError, ValueError):
        pass  # The reader has gone: the job's own output meets that, too.


START = Start()
"""A process starts one job at a time."""
