"""Streams of a device that is not there: they write marks and waits into a program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from shardwright.activations import HostPool, rounded
from shardwright.engine import Host
from shardwright.engine.comm import HostStreams
from shardwright.planner.program import HOST
from shardwright.planner.tracing.recorder import ProgramRecorder

CAPTURE = "capture"  #: the stream on which a CUDA graph is captured


class RecordedStreams(HostStreams):
    """The streams of an accelerator. Work on them is noted and never runs later, so the rest is as on the host."""

    asynchronous = False
    captures = True

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder
        self._graphs = 0

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

    def warm_up(self, function: Callable[[], Any]) -> Any:
        recorder = self._recorder
        recorder.wait(CAPTURE, recorder.mark(recorder.stream))
        with recorder.on(CAPTURE):
            result = function()
        recorder.wait(recorder.stream, recorder.mark(CAPTURE))
        return result

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        recorder = self._recorder
        self._graphs += 1
        with recorder.capturing(self._graphs) as work, recorder.on(CAPTURE):
            self.capturing = True
            try:
                result = function()
            finally:
                self.capturing = False

        def replay() -> None:
            recorder.wait(CAPTURE, recorder.mark(recorder.stream))
            recorder.run_graph(work)
            recorder.wait(recorder.stream, recorder.mark(CAPTURE))

        return replay, result


@contextmanager
def memory_of_host(recorder: ProgramRecorder) -> Iterator[None]:
    """Inside the context memory that the engine takes on the host of a device is apart from the device's.

    The host also computes what follows from tensors there, until the engine copies them to the device.
    """
    allocate = HostPool._allocate
    zeros, lasting, copy_of, lifted = Host.zeros, Host.lasting_zeros, Host.copy_of, Host.lifted
    own = Host.bytes_for_rank

    def on_host(self: Host, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with recorder.on(HOST):
            return zeros(self, numel, dtype)

    def on_host_rounded(self: Host, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        with recorder.on(HOST):
            return zeros(self, rounded(nbytes) // dtype.itemsize if nbytes else 0, dtype)[:numel]

    def for_activations(self: HostPool, size: int) -> torch.Tensor:
        buffer = allocate(self, size)
        recorder.claim("activations", [("activations of blocks", buffer)])
        return buffer

    def copied(self: Host, tensor: torch.Tensor) -> torch.Tensor:
        with recorder.on(HOST):
            return copy_of(self, tensor)

    def on_device(self: Host, tensor: torch.Tensor) -> torch.Tensor:
        with recorder.lifting():
            return lifted(self, tensor)

    Host.zeros, Host.lasting_zeros = on_host_rounded, on_host  # type: ignore[method-assign]
    Host.copy_of, Host.lifted = copied, on_device  # type: ignore[method-assign, assignment]
    Host.bytes_for_rank = lambda self: sys.maxsize  # type: ignore[method-assign]  # the host is another one
    HostPool._allocate = for_activations  # type: ignore[method-assign]
    try:
        yield
    finally:
        Host.zeros, Host.lasting_zeros = zeros, lasting  # type: ignore[method-assign]
        Host.copy_of, Host.lifted = copy_of, lifted  # type: ignore[method-assign]
        Host.bytes_for_rank = own  # type: ignore[method-assign]
        HostPool._allocate = allocate  # type: ignore[method-assign]


@contextmanager
def streams_of_torch(recorder: ProgramRecorder) -> Iterator[None]:
    """Inside the context the streams and events of ``torch.cpu``, which do nothing, are those of an accelerator.

    Torch's FSDP2 queues gathers and reductions on them.
    """
    streams: dict[str, Stream] = {}

    class RecordedEvent:
        number: int | None = None

        def record(self, stream: Stream | None = None) -> None:
            self.number = recorder.mark((stream or current_stream()).name)

        def wait(self, stream: Stream | None = None) -> None:
            if self.number is not None:
                recorder.wait((stream or current_stream()).name, self.number)

        def synchronize(self) -> None:
            if self.number is not None:
                recorder.host_wait(self.number)

        def query(self) -> bool:
            return True

    class Stream:
        def __init__(self, priority: int = 0, name: str = "") -> None:
            self.name = name or f"torch {len(streams)}"
            streams[self.name] = self

        def record_event(self, event: RecordedEvent | None = None) -> RecordedEvent:
            event = event or RecordedEvent()
            event.record(self)
            return event

        def wait_event(self, event: RecordedEvent) -> None:
            event.wait(self)

        def wait_stream(self, stream: Stream) -> None:
            self.wait_event(stream.record_event())

        def synchronize(self) -> None:
            self.record_event().synchronize()

    def current_stream(device: Any = None) -> Stream:
        return streams.get(recorder.stream) or Stream(name=recorder.stream)

    @contextmanager
    def stream(other: Stream | None) -> Iterator[None]:
        with nullcontext() if other is None else recorder.on(other.name):
            yield

    replaced = {
        "Stream": Stream,
        "Event": RecordedEvent,
        "current_stream": current_stream,
        "stream": stream,
    }
    before = {name: getattr(torch.cpu, name) for name in replaced}
    try:
        for name, value in replaced.items():
            setattr(torch.cpu, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(torch.cpu, name, value)
