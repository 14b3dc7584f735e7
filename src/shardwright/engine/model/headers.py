"""The headers that are sent with every gather on an accelerator: a unit's number and the age of a rank's weights."""

from __future__ import annotations

import torch

from shardwright.engine.base.home import HEADER
from shardwright.engine.comm import Communicator, Streams


class Headers:
    """The headers of all units of a model, in one memory, so that one call compares them."""

    def __init__(self, comms: list[Communicator], device: torch.device, streams: Streams) -> None:
        """``comms``: the communicators of each unit's gathers."""
        self._streams = streams
        rows = [[number, 0] for number in range(len(comms))]
        received = [word for row, comm in zip(rows, comms, strict=True) for word in row * comm.world_size]
        own: list[int] = []  # indices of this rank's own words
        for comm in comms:
            start = len(own) + HEADER * comm.rank
            own += [start + word for word in range(HEADER)] * comm.world_size
        with streams.fork("gather"):  # only this stream reads, writes and releases these tensors
            self._sent = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
            self._received = torch.tensor(received, dtype=torch.int64, device="cpu").to(device)
            self._own = torch.tensor(own, dtype=torch.int64, device="cpu").to(device)
        self._places = self._received.split([HEADER * comm.world_size for comm in comms])

    def of(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The header that is sent with each gather of a unit, and the memory for the headers of all ranks."""
        return self._sent[number], self._places[number]

    def set_age(self, age: int) -> None:
        # After running gathers, but without waiting for the optimizer's work on other streams.
        with self._streams.beside("gather"):
            self._sent.select(1, 1).fill_(age)  # an assignment would make a tensor from the number

    def mine(self, edits: torch.Tensor) -> torch.Tensor:
        """The root's header, whose first word may be overwritten, and a hash of edits, int64 [1]."""
        return torch.cat((self._sent[0], edits))

    def differ(self) -> torch.Tensor:
        """Whether any rank has sent another header than this rank; a tensor on the device."""
        return (self._received != self._received[self._own]).any()

    def forget(self) -> None:
        """Reset the received headers, because they were compared."""
        self._received.copy_(self._received[self._own])
