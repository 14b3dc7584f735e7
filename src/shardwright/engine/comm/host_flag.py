"""A flag that a device sets and the host reads. The host waits for its copy only, not for later work of the device."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.engine.comm.streams import Streams


def host_memory(device: torch.device) -> torch.Tensor:
    """One bool of the host, page-locked if the device is an accelerator."""
    return torch.zeros(1, dtype=torch.bool, device="cpu", pin_memory=device.type != "cpu")


class HostFlag:
    """One flag on a device, and its copy in page-locked memory of the host.

    Both live as long as this object, so that a CUDA graph can set them.
    """

    def __init__(self, streams: Streams, device: torch.device, stream: str) -> None:
        """``stream``: the side stream that sets the flag and copies it."""
        self._streams, self._stream = streams, stream
        with streams.fork(stream):
            self._value = torch.zeros(1, dtype=torch.bool, device=device)
        self._copy = host_memory(device)
        self._mark: Any = None
        self._is_set = False  #: whether the copy has been written since the last read
        self._conditions: list[
            torch.Tensor
        ] = []  #: tensors of other streams that the side stream may still read

    def set_after(self, condition: torch.Tensor) -> None:
        """Set the flag if ``condition``, one bool that the computation has made, is true."""
        self._conditions.append(condition)
        with self._streams.fork(self._stream):
            self.set_on_stream(condition)

    def set_on_stream(self, condition: torch.Tensor) -> None:
        """Set the flag if ``condition``, one bool of the side stream, is true. The side stream must be current."""
        self._value.logical_or_(condition)
        self._copy.copy_(self._value, non_blocking=True)
        if not self._streams.capturing:
            self._mark, self._is_set = self._streams.mark(self._stream), True

    def set_by_graph(self) -> None:
        """A replay of a graph that sets the flag has been queued. A read waits for the graph's end."""
        self._mark, self._is_set = self._streams.mark(self._stream), True

    def read(self) -> bool:
        """Whether the flag was set since the last read. The host waits for the flag's copy. Resets the flag."""
        if not self._is_set:
            return False
        self._streams.host_wait(self._mark)
        self._mark, self._is_set = None, False
        self._conditions.clear()
        found = bool(self._copy.tolist()[0])
        if found:
            with self._streams.beside(self._stream):
                self._value.zero_()
            self._copy.zero_()
        return found
