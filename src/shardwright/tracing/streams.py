"""Streams of a device that is not there: they write marks and waits into a program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.comm.streams import HostStreams
from shardwright.tracing.recorder import Recorder


class RecordedStreams(HostStreams):
    """The streams of an accelerator. Work on them is noted and never runs later, so the rest is as on the host."""

    asynchronous = False

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        recorder = self._recorder
        recorder.wait(name, recorder.mark(recorder.stream))
        with recorder.on(name):
            yield

    @contextmanager
    def beside(self, name: str, after: Any = None) -> Iterator[None]:
        if after is not None:
            self._recorder.wait(name, after)
        with self._recorder.on(name):
            yield

    def mark(self, name: str) -> int:
        return self._recorder.mark(name)

    def join(self, mark: Any) -> None:
        if mark is not None:
            self._recorder.wait(self._recorder.stream, mark)

    def host_wait(self, mark: Any) -> None:
        if mark is not None:
            self._recorder.host_wait(mark)
