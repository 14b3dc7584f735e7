"""A unit's view of its model: its number there, and the objects that its weights and gradients call."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from shardwright.engine.base.clock import Clock
from shardwright.engine.comm import Communicator

HEADER = 2  #: int64 words sent with every gather: the unit's number, and the age of the rank's weights
#: From a communicator and the number of bytes: the function to call directly before the collective.
Announcer = Callable[[Communicator, int], "Callable[[], None] | None"]


class Announcements(Protocol):
    """Detects ranks that have diverged. See ``model/agreement.py``."""

    def announce_gather(
        self, number: int, comm: Communicator, nbytes: int, extended: int = 0
    ) -> Callable[[], None] | None: ...

    def announce_reduction(
        self, number: int, fingerprint: int, comm: Communicator, nbytes: int
    ) -> Callable[[], None] | None: ...

    def compare_edit(self, number: int, name: str, fingerprint: Callable[[], torch.Tensor]) -> None: ...

    def agree_on_missing(self, comm: Communicator, number: int, parameter: int) -> None: ...

    def diverged_gathers(self, comm: Communicator, headers: list[tuple[int, ...]]) -> NoReturn: ...


class Arriving(Protocol):
    """Units whose gradients are on their way to the CPU's memory. See ``model/arrivals.py``."""

    def add(self, unit: Any) -> None: ...


class Reducing(Protocol):
    """The running reductions of a model. See ``model/reductions.py``."""

    @property
    def arrivals(self) -> Arriving: ...

    def make_room(self, number: int) -> None: ...

    def add(self, number: int) -> None: ...

    def collect(self) -> None: ...


class Home(Protocol):
    """A unit's model.

    Attributes:
        gathered: numbers of the units whose slabs are leased.
        full_precision: whether weights are gathered in their storage dtypes.
        backward: whether a backward has reached the model and has not ended.
        is_last_backward: whether it is the last backward of a step.
        selected: if the user has selected the tensors that get gradients, the units with parameters among them.
            Else None.
        clock: the clock of the model.
        task: returns None if no backward of the model runs, or if it has failed.
    """

    gathered: set[int]
    full_precision: bool
    backward: bool
    is_last_backward: bool
    selected: Collection[Any] | None
    clock: Clock
    task: Callable[[], Any]

    @property
    def agreement(self) -> Announcements: ...

    @property
    def reductions(self) -> Reducing: ...

    def enter_backward(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A unit's place in its model.

    Attributes:
        home: the model.
        number, name: the unit's number and name.
        label: the unit's name in profiles; empty for the root.
        header: int64 words that are sent with each gather of the unit.
        headers: receives the headers of all ranks.
    """

    home: Home
    number: int
    name: str
    label: str
    header: torch.Tensor
    headers: torch.Tensor

    def bytes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The header and the headers as bytes, for gathers."""
        return self.header.view(torch.uint8), self.headers.view(torch.uint8)

    def check_headers(self, comm: Communicator) -> None:
        """Raise if another rank of a gather gathered another unit, or weights of another age.

        Reads the headers: on an accelerator the host waits.
        """
        words = self.headers.tolist()  # one view for all rows, which saves an operation in each gather
        if words[0] != self.number or words != words[:HEADER] * (len(words) // HEADER):
            rows = list(zip(*[iter(words)] * HEADER, strict=True))
            self.home.agreement.diverged_gathers(comm, rows)
