"""Streams of the computation that two threads note and rejoin at once."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch

from shardwright.comm import DeviceStreams

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
