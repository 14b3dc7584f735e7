"""The function that a long read or write reports its progress to."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int], None]  #: gets the number of bytes since the last call


def ignore(nbytes: int) -> None:
    """No progress is shown."""
