"""Exceptions at a chosen line of the engine, as the handler of a signal raises them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Interrupt(KeyboardInterrupt):
    """The exception that a test raises at a line of the engine."""


@contextmanager
def interrupted_at(n: int, part: str = "/shardwright/") -> Iterator[list[int]]:
    """Raise before the ``n``-th line of the engine, or of this part, that runs inside. Yields how many there were, and
    the numbers of those that ran for the first time.

    Not where torch functions are off: what a tracer raises at the end of a ``with`` leaves out its exit, which nothing
    else that interrupts Python does.
    """
    count, raised, seen = [0], False, set()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal raised
        if part not in frame.f_code.co_filename:
            return None
        if event == "line":
            count[0] += 1
            if (place := (frame.f_code.co_filename, frame.f_lineno)) not in seen:
                seen.add(place)
                count.append(count[0])
            if 0 < n <= count[0] and not raised and torch._C._is_torch_function_enabled():
                raised = True
                raise Interrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)
