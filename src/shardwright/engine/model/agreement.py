"""How the ranks of a model find that they have diverged: what each is about to do, and how old its weights are.

On gloo they show each other a record before each collective, since a wrong pairing aborts the process or hangs. On an
accelerator the host must not wait: numbers travel with the gathers, are compared on the device, and one flag is read
before the next step. Nothing here gathers or reduces weights. The errors are in ``divergence.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch

from shardwright.comm import Communicator, Meeting, Unreached, new_failure, notices
from shardwright.engine.model.divergence import (
    DOING,
    END_BACKWARD,
    GATHER,
    LEFT_BY,
    MISSING,
    REDUCE,
    UNSHARD,
    Model,
    Record,
)
from shardwright.engine.model.headers import Headers
from shardwright.engine.tensors import reading
from shardwright.engine.tensors.reading import FULL
from shardwright.engine.unit.unit import Unit


class Agreement:
    """That of the units of one model.

    Attributes:
        model: the one whose ranks agree.
        age: steps of optimizers since the weights were made or loaded.
        flag: on an accelerator, whether the ranks have diverged; it is there after ``flag_mark``.
    """

    def __init__(self, units: list[Unit], names: list[str]) -> None:
        ranks = units[0].ranks
        self.streams = ranks.comm.streams
        self.model = Model(units, names, ranks)
        self.age = 0
        self.flag: torch.Tensor | None = None
        self.flag_mark: Any = None
        self._reduced = 0  #: stands for the reductions of the backward under way, in their order
        #: For each axis, what every rank has sent at the end of the last backward: that number, and its age.
        self._orders: dict[Communicator, torch.Tensor] = {}
        #: Where the ranks meet, and how often they had met when the forward or backward under way began.
        self._meeting_numbers: dict[Meeting, int] = {}
        self._headers = Headers([unit.comm for unit in units], ranks.device, self.streams)

    def begin(self) -> None:
        """The model is complete."""
        self.model.begin()

    def headers_of(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What goes with each gather of a unit, and where every rank's arrives."""
        return self._headers.of(number)

    def set_age(self, age: int) -> None:
        if age != self.age:
            self.age = age
            self._headers.set_age(age)

    def forget_backward(self) -> None:
        """A backward has failed: the order of reductions begins again with the next one."""
        self._reduced = 0

    # -- before a collective -------------------------------------------------------------------------------------

    def announce_gather(
        self, number: int, comm: Communicator, nbytes: int, extended: int = 0
    ) -> Callable[[], None] | None:
        """What is to be called before a gather of a unit, when nothing can fail on this rank alone any more.

        ``extended`` stands for the parameters that have ``fsdp_pre_all_gather``.
        """
        if comm.exchanges:
            return lambda: self._agree(comm, GATHER, number, nbytes, extended)
        return None

    def announce_reduction(
        self, number: int, fingerprint: int, comm: Communicator, nbytes: int
    ) -> Callable[[], None] | None:
        """What is to be called before a collective of a reduction of a unit."""
        if comm.exchanges:
            return lambda: self._agree(comm, REDUCE, number, nbytes, fingerprint)
        self._reduced = hash((self._reduced, number, fingerprint, comm.world_size))
        return None

    def agree_on_missing(self, comm: Communicator, number: int, parameter: int) -> None:
        """This rank has no values of a parameter of a unit, of this place, where others may be about to gather."""
        if comm.exchanges:
            self._agree(comm, MISSING, number, parameter)

    def agree_all(self, event: int, number: int) -> None:
        """Agree with every rank of the meshes, axis by axis."""
        for i, comm in enumerate(self.model.every):
            try:
                if comm.exchanges:
                    self._agree(comm, event, number)
            except BaseException as error:
                if comm.meeting is not None and not isinstance(error.__cause__, Unreached):
                    comm.meeting.agreed(_limit_of(event))  # interrupted, it may be under way
                # The others come to those axes that are left, or leave a step and show that in all groups.
                over = {c.meeting for c in self.model.every[: i + 1]}
                rest = [meeting for meeting in self._meetings() if meeting not in over]
                self._leave(event, error, rest, _failure([c.meeting for c in self.model.every if c.meeting]))
                raise

    def _agree(self, comm: Communicator, event: int, number: int, nbytes: int = 0, detail: int = 0) -> None:
        """Raise if another rank is about to do something else."""
        try:
            record = Record(event, number, nbytes, detail, self.model.number, self.age)
            records = comm.exchange(record, _limit_of(event))
        except Unreached as error:
            way_out = f" {reading.way_out(FULL)}" if event == UNSHARD else ""
            raise RuntimeError(
                f"Rank {comm.ranks[comm.rank]} {DOING[event][0]} {self.model.name_of(number)}, and {error}{way_out}"
            ) from error
        if records is not None:
            self.model.refuse_rows(comm, records)

    # -- leaving by an exception ---------------------------------------------------------------------------------

    def enter(self) -> int:
        """A forward or backward begins. Returns how many failures there have been in the model's groups."""
        if any(comm.exchanges for comm in self.model.every):
            self._meeting_numbers = {meeting: meeting.number for meeting in self._meetings()}
            for meeting in self._meeting_numbers:
                meeting.left_by = 0
        return sum(meeting.failures for meeting in self._meeting_numbers)

    def leave(self, event: int, error: BaseException) -> None:
        """This rank leaves what ``event`` ends: show it where the others come next.

        If ranks have met since it began, all are in it, and come to its end on every axis; also if they did not agree,
        as ranks whose weights are of different ages. Else they may have no part in it, and this rank's next meeting
        shows it.
        """
        meeting_numbers, self._meeting_numbers = self._meeting_numbers, {}
        for meeting in meeting_numbers:
            meeting.settle()
            meeting.agreed()
        if any(m.number > number or m.disagreed() for m, number in meeting_numbers.items()):
            self._leave(event, error, list(meeting_numbers), _failure(list(meeting_numbers)))

    def _leave(self, event: int, error: BaseException, meetings: list[Meeting], failure: int) -> None:
        agreed_meetings = [meeting for meeting in meetings if meeting.agreed()]
        if not agreed_meetings:
            return
        notices.post(f"has left {LEFT_BY[event]} {self.model.name_of(0)} by {notices.describe(error)}")
        for meeting in agreed_meetings:
            meeting.leave(failure, (event, self.model.number, self.age))

    def _meetings(self) -> list[Meeting]:
        """Of all groups over which units communicate."""
        comms = [*self.model.every, *(comm for unit in self.model.units() for comm in unit.communicators())]
        return list(dict.fromkeys(c.meeting for c in comms if c.exchanges and c.meeting is not None))

    # -- on an accelerator ---------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Compare on the device, beside the computation, what this backward's gathers and reductions were."""
        streams, reduced = self.streams, self._reduced
        self._reduced = 0
        if streams.asynchronous:
            return
        with streams.beside("gather"):
            flag = self._headers.differ()
            mine = self._headers.mine()
            mine[0] = reduced
            for comm in self.model.every:
                self._orders[comm] = order = comm.gather_row(mine)
                flag = flag | (order != order[comm.rank]).any()
            self.flag = flag if self.flag is None else flag | self.flag
        self.flag_mark = streams.mark("gather")

    def check(self) -> None:
        """Raise if what was compared since the last look differed. Reads one flag of the device.

        Not in a capture: whoever runs the graph puts its flag in place, to be looked at outside.
        """
        if self.streams.capturing:
            return
        flag, self.flag = self.flag, None
        if flag is None:
            return
        self.streams.join(self.flag_mark)
        if not flag.item():
            return
        for unit in self.model.units():
            place = unit.weights.place
            if unit.parameters and place is not None and place.home.agreement is self:
                place.check_headers(unit.comm)
        for comm, order in self._orders.items():
            records = [Record(END_BACKWARD, 0, 0, 0, self.model.number, age) for age in order[:, 1].tolist()]
            if len(set(records)) > 1:
                self.model.refuse(dict(zip(comm.ranks, records, strict=True)))
        raise RuntimeError(
            f"The ranks have diverged: in the last backward of {self.model.name_of(0)} they reduced gradients of "
            "different units or parameters, or in different orders. Every rank must use the outputs of the same "
            "units and have the same requires_grad."
        )

    def diverged_gathers(self, comm: Communicator, headers: list[tuple[int, ...]]) -> NoReturn:
        """The ranks gathered units of these numbers, with weights of these ages."""
        self._headers.forget()
        records = [Record(GATHER, number, 0, 0, self.model.number, age) for number, age in headers]
        self.model.refuse(dict(zip(comm.ranks, records, strict=True)))


def _limit_of(event: int) -> timedelta | None:
    """How long a rank waits for the others before it; None: for the group's timeout."""
    return reading.LIMIT_OF_FULL if event == UNSHARD else None


def _failure(meetings: list[Meeting]) -> int:
    """That by which this rank leaves: the others', if it has heard of one, or one that it has left by already."""
    for meeting in meetings:
        if meeting.disagreed():
            return meeting.failure
    return next((m.left_by for m in meetings if m.left_by), 0) or new_failure()
