"""Streams of the computation: those of collectives are none, and none that another thread notes is lost."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch

from shardwright.engine.comm import DeviceStreams
from tests.support.sim import load, on_sim

COUNT = 4000


class Stream:
    def __init__(self, number: int) -> None:
        self.stream_id = number
        self.waits: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.stream_id)


def test_no_stream_is_lost_or_waited_for_twice() -> None:
    """Autograd's thread notes streams while the program's thread rejoins."""
    mine = threading.local()
    streams: Any = object.__new__(DeviceStreams)
    streams._api = SimpleNamespace(current_stream=lambda device: mine.stream)
    streams._device, streams._computations = torch.device("cpu"), {}
    streams._side = SimpleNamespace(numbers=set())
    made = [Stream(number) for number in range(1, COUNT + 1)]
    errors: list[BaseException] = []

    def note() -> None:
        try:
            for stream in made:
                mine.stream = stream
                streams.note_current()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        mine.stream = current = Stream(0)
        thread = threading.Thread(target=note)
        thread.start()
        while thread.is_alive():
            streams.rejoin()
        thread.join()
        streams.rejoin()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert sorted(current.waits) == list(range(1, COUNT + 1))
    assert all(stream.waits == [0] for stream in made)


@on_sim(1)
def test_a_collective_within_a_collective_is_not_part_of_the_computation(rank: int, world_size: int) -> None:
    """A hook of gradients issues collectives of its own. The computation must not wait for its whole stream."""
    sim = load()
    streams = DeviceStreams(sim.device)
    with sim.running(1), streams.fork("reduce"):
        streams.note_current()
        with streams.fork("all_reduce"), streams.fork("compress"):
            pass
        current = torch.accelerator.current_stream(sim.device)
        assert current == streams.side("reduce") and list(streams._computations.values()) != [current]
        assert len(streams._computations) == 1
