"""A stand-in for an accelerator: CPU tensors and gloo, and the engine's path for a device with streams.

Nothing runs beside anything; what comes out are real numbers. What must wait for what is told by the simulator
(races.py), which has no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.engine.comm import HostStreams, use_streams


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
    with use_streams(torch.device("cpu"), streams):
        yield streams
