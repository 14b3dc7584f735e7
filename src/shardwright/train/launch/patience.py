"""Words for waits: a job that is busy for seconds says so, or it looks stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 2.5
"""Seconds between two lines: nothing is silent for longer than 3."""


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
