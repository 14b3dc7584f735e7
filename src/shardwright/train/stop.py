"""Signals that ask a job to save and end. They are stored until the loop reads them.

This file does not decide after which step the ranks end; the loop does.
"""

from __future__ import annotations

import math
import signal
import time
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Stores SIGINT or SIGTERM, which the loop reads between steps. Another one, a second later, ends at once."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._first = math.inf
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A terminal's Ctrl-C may arrive twice, once directly and once from the launcher.
        if time.monotonic() - self._first > 1.0:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.signal_number is None:
            self.signal_number, self._first = number, time.monotonic()

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
