"""Streams of a device that is not there: they write marks and waits into a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.tracing.recorder import Recorder


class RecordedStreams:
    """The streams of an accelerator, see :class:`shardwright.comm.streams.Streams`. Nothing runs later."""

    asynchronous = False
    captures = False
    capturing = False

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

    def note_current(self) -> None:
        return None

    def rejoin(self) -> None:
        return None

    def mark(self, name: str) -> int:
        return self._recorder.mark(name)

    def join(self, mark: Any) -> None:
        if mark is not None:
            self._recorder.wait(self._recorder.stream, mark)

    def host_wait(self, mark: Any) -> None:
        if mark is not None:
            self._recorder.host_wait(mark)

    def is_over(self, mark: Any) -> bool:
        return True

    def gather_after(self, event: Any) -> None:
        return None

    def mark_of_events(self) -> None:
        return None

    def warm_up(self, function: Callable[[], Any]) -> Any:
        return function()

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        raise NotImplementedError("a plan has no graphs: plan the step without train.cuda_graph")
