"""A stand-in for an accelerator: CPU tensors and gloo, and the engine's path for a device with streams.

Nothing runs beside anything; what comes out are real numbers. What must wait for what is told by the simulator
(races.py), which has no numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shardwright.comm import Communicator, HostStreams, Pending, collectives
from shardwright.comm.custom import FlatGathers
from shardwright.engine import api


class StandIn(HostStreams):
    """Streams on which all is over at once, though every other question says that it is not yet."""

    asynchronous = False

    def __init__(self) -> None:
        self.waits = 0  #: how often the host was made to wait
        self._asked = 0

    def mark(self, name: str) -> Any:  # type: ignore[override]
        return name

    def host_wait(self, mark: Any) -> None:
        self.waits += mark is not None

    def is_over(self, mark: Any) -> bool:
        self._asked += 1
        return self._asked % 2 == 0


@contextmanager
def stand_in_device() -> Iterator[StandIn]:
    """Models sharded inside take the CPU for an accelerator. Train them inside, too."""
    streams = StandIn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "streams_for", lambda device: streams)
        patch.setattr(api, "_communicators", weakref.WeakValueDictionary())
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            patch.setattr(Communicator, name, _at_once(getattr(Communicator, name), name == "all_gather"))
        patch.setattr(FlatGathers, "all_gather", _at_once(FlatGathers.all_gather, True))
        divided = Communicator._divided

        def divided_after(comm: Communicator, work: Any, *given: Any) -> Pending:
            work.wait()
            return divided(comm, None, *given)

        patch.setattr(Communicator, "_divided", divided_after)
        for cache in ("_separate", "_neighbours"):
            patch.setattr(collectives, cache, weakref.WeakKeyDictionary())
        yield streams


def _at_once(collective: Callable[..., Pending], gathers: bool) -> Callable[..., Pending]:
    """On a stream, what comes later may read a collective's result without that the host has waited for it."""

    def call(comm: Communicator, outputs: Any, inputs: Any, casts: Any = None, on_done: Any = None,
             announce: Any = None) -> Pending:  # fmt: skip
        streams: Any = comm.streams
        before = streams.asynchronous
        streams.asynchronous = (
            True  # gloo has no collective that is over when it returns: wait before decoding, too
        )
        try:
            pending = collective(comm, outputs, inputs, casts or ([], []), None, announce)
        finally:
            streams.asynchronous = before
        pending.wait()
        return Pending(comm.streams, None, "mark", finish=on_done)

    def reduce(comm: Communicator, *given: Any) -> Pending:
        collective(comm, *given).wait()
        return Pending(comm.streams, None, "mark")

    return call if gathers else reduce
