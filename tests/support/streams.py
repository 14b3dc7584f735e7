"""Streams, events and the device of the simulated accelerator (races.py), each stream with a vector clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.support.races import Simulator

Clock = dict[int, int]  #: by stream: how many of its operations are surely over


def join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


class Event:
    """As ``torch.cuda.Event``: a moment of a stream."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self._simulator.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._simulator.current).wait_event(self)

    def synchronize(self) -> None:
        join(self._simulator.host, self.clock)

    def query(self) -> bool:
        """Every other time it is over, and then the host knows."""
        self._simulator.queries += 1
        if self._simulator.queries % 2:
            return False
        self.synchronize()
        return True


class Stream:
    """As ``torch.cuda.Stream``: its operations run one after another, and beside those of other streams."""

    def __init__(self, simulator: Simulator, name: str) -> None:
        self._simulator = simulator
        self.name = name
        self.number = self.stream_id = len(simulator.streams)
        self.clock: Clock = {self.number: 0}
        simulator.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        join(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._simulator)
        event.record(self)
        return event

    def synchronize(self) -> None:
        join(self._simulator.host, self.clock)

    def tick(self) -> int:
        """The time of the stream's next operation, which the host issues now."""
        join(self.clock, self._simulator.host)
        self.clock[self.number] += 1
        return self.clock[self.number]


class HostStream(Stream):
    """The host: what it has done is over when it issues anything else."""

    def tick(self) -> int:
        time = super().tick()
        join(self._simulator.host, self.clock)
        return time


class Device:
    """The module that ``torch.get_device_module`` gives for the simulated accelerator."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def Stream(self, device: torch.device | None = None, priority: int = 0, name: str = "") -> Stream:
        return Stream(self._simulator, name or f"stream {len(self._simulator.streams)}")

    def Event(self, **options: Any) -> Event:
        return Event(self._simulator)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self._simulator.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._simulator.current = self._simulator.current, stream
        try:
            yield
        finally:
            self._simulator.current = before
