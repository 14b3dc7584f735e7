"""JSON objects through pipes, between a trainer and its writer process. Imports neither of them."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Generic, TypeVar

from shardwright.checkpoint.asynchronous.messages import Command, Report

M = TypeVar("M", Command, Report)


class JsonLines(Generic[M]):
    """JSON objects of one kind, one a line, through a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._rest = b""
        self.ended = False

    def next(self, seconds: float | None = None) -> M | None:
        """The next object; None after so many seconds, or if the other end is closed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            poller = select.poll()
            poller.register(self.descriptor, select.POLLIN)
            if self.ended or not poller.poll(None if left is None else left * 1000):
                return None
            data = os.read(self.descriptor, 1 << 16)
            self.ended = not data
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        content: M = json.loads(line)
        return content


def send(descriptor: int, message: Command | Report) -> None:
    """Write an object for :class:`JsonLines` at the other end. Raises OSError if that is closed."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]
