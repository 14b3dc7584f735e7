"""Detects ranks of a model that have diverged: it compares their next actions and the ages of their weights.

On gloo ranks exchange a record before each collective, because a wrong pairing aborts the process or hangs. On an
accelerator the host must not wait. So numbers are sent with the gathers and compared on the device, and the host reads
one flag before the next step. Nothing here gathers or reduces weights. ``divergence.py`` has the errors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from shardwright.engine import heartbeat
from shardwright.engine.comm import Communicator, HostFlag, Meeting, Unreached, new_failure, notices, separate
from shardwright.engine.model.divergence import (
    CLIP,
    DOING,
    END_BACKWARD,
    END_FORWARD,
    ENDS,
    GATHER,
    LEFT_BY,
    MISSING,
    REDUCE,
    UNSHARD,
    Model,
    Record,
)
from shardwright.engine.model.headers import Headers
from shardwright.engine.tensors.numbers import reading
from shardwright.engine.tensors.numbers.averaging import check_values, values_replayed
from shardwright.engine.tensors.numbers.reading import FULL
from shardwright.engine.unit.unit import Unit


class Steps:
    """The age of the weights.

    Steps within a backward (by hooks of parameters) count at its end, because gradients of an offloaded unit arrive at
    the host at different times on different ranks.

    Attributes:
        age: steps of optimizers since the weights were made or loaded; negative after a step that did not end.
    """

    def __init__(self, headers: Headers) -> None:
        self.age = 0
        self._within = 0  #: steps in the running backward
        self._headers = headers

    def add(self, in_backward: bool) -> None:
        """Count a step of an optimizer."""
        if in_backward:
            self._within += 1
        elif self.age >= 0:
            self._set(self.age + 1)

    def end_backward(self, stepped: int = 0) -> None:
        """Count the steps of a backward. ``stepped``: 1 if ``sw.optim.in_backward`` has stepped the units in it, or how
        many of them if the backward has failed."""
        within, self._within = self._within + stepped, 0
        if self.age >= 0:
            self._set(self.age + within)

    def interrupt(self) -> None:
        """Note that a step has changed some weights, and perhaps not all. The age then differs from that of ranks whose
        step has ended."""
        if self.age >= 0:
            self._set(-1 - self.age)

    @property
    def interrupted(self) -> bool:
        """Whether a step did not end, and the weights were not loaded since."""
        return self.age < 0

    def forget(self) -> None:
        """The weights were loaded."""
        self._set(0)

    def _set(self, age: int) -> None:
        if age != self.age:
            self.age = age
            self._headers.set_age(age)


class Agreement:
    """The agreement of one model's ranks.

    Attributes:
        model: the model.
        steps: the age of its weights.
    """

    def __init__(self, units: list[Unit], names: list[str]) -> None:
        ranks = units[0].ranks
        self.streams = ranks.comm.streams
        self.model = Model(units, names, ranks)
        self._failures = 0  #: in the model's groups, at the begin of the last forward or backward
        self._reduced = 0  #: a hash of the running backward's reductions, in their order
        #: For each axis, a hash of this rank's edits of full weights: int64 [1]. On an accelerator it stays the same
        #: tensor, because graphs read it.
        self._edits: dict[Communicator, torch.Tensor] = {}
        self._is_edited = False  #: whether there were edits since the ranks agreed on them
        self._edits_are_compared = False  #: by the last :meth:`compare` that ran
        self._interruption_is_compared = False  #: whether the ranks have met since an interrupted step
        #: For each axis, the numbers of all ranks from the end of the last backward: both hashes, and the age.
        self._orders: dict[Communicator, torch.Tensor] = {}
        #: The meetings, and how often they had met when the running forward or backward began.
        self._meeting_numbers: dict[Meeting, int] = {}
        #: The event that ends the running forward or backward; None: it has ended, or this rank has left it. It stays
        #: if a signal's handler raises while this rank leaves.
        self._running: int | None = None
        #: The meeting at the end of the last axis, and how often it has met when the forward or backward has ended.
        self._last_meeting: tuple[Meeting, int] | None = None
        self._headers = Headers([unit.comm for unit in units], ranks.device, self.streams)
        self.steps = Steps(self._headers)
        #: Whether the ranks have diverged, on an accelerator with several ranks.
        self._differs: HostFlag | None = None
        #: For each axis, the communicator of :meth:`compare`. One communicator's collectives run one after another: on
        #: that of the reductions the comparison, and with it the host, would wait for the whole backward.
        self._beside: dict[Communicator, Communicator] = {}
        if self.model.every and not self.streams.asynchronous:
            self._differs = HostFlag(self.streams, ranks.device, "gather")
            for comm in self.model.every:
                self._edits[comm] = torch.zeros(1, dtype=torch.int64, device=ranks.device)
                self._beside[comm] = separate(comm)
            with self.streams.fork("gather"):  # which reads them from now on
                pass

    def begin(self) -> None:
        """Begin, because the model is complete."""
        self.model.begin()

    def headers_of(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The header that is sent with each gather of a unit, and the memory for the headers of all ranks."""
        return self._headers.of(number)

    def compare_edit(self, number: int, name: str, fingerprint: Callable[[], torch.Tensor]) -> None:
        """Compare an edit of full weights, ``fingerprint()``, over the ranks that must have made the same one.

        On gloo at the end of the running forward or backward, on an accelerator at the end of the next backward.
        """
        unit = next((u for u in self.model.units() if u.number == number), None)
        axes = unit.ranks.every if unit is not None else []
        if not axes:
            return
        self.model.edited[number, name] = None
        self._is_edited, self._edits_are_compared = True, False
        value = fingerprint() * (
            2 * zlib.crc32(f"{number} {name}".encode()) + 1
        )  # a sum, so that 0 changes nothing
        for comm in axes:
            edits = self._edits.get(comm)
            if edits is None:
                self._edits[comm] = value.cpu().view(1)
            else:
                edits.add_(value.to(edits.device))

    def loaded(self) -> None:
        """Forget earlier differences, because a state dict has given every rank the same weights."""
        self.steps.forget()
        self._forget_edits()

    def _forget_edits(self) -> None:
        if self._differs is None:
            self._edits.clear()
        elif self._is_edited:
            for edits in self._edits.values():
                edits.zero_()
        self._is_edited = False
        self.model.edited.clear()

    def forget_backward(self) -> None:
        """Reset the order of reductions, because a backward has failed."""
        self._reduced = 0

    # -- before a collective -------------------------------------------------------------------------------------

    def announce_gather(
        self, number: int, comm: Communicator, nbytes: int, detail: int = 0
    ) -> Callable[[], None] | None:
        """The function to call directly before a gather of a unit.

        ``detail``: the ``detail`` of the unit's :class:`Gather`.
        """
        if heartbeat.current is not None:
            heartbeat.current.enter("all-gather", comm.name, nbytes, self.model.names[number])
        if comm.exchanges:
            return lambda: self._agree(comm, GATHER, number, nbytes, detail)
        return None

    def announce_reduction(
        self, number: int, fingerprint: int, comm: Communicator, nbytes: int
    ) -> Callable[[], None] | None:
        """The function to call directly before a collective of a unit's reduction."""
        if comm.exchanges:
            return lambda: self._agree(comm, REDUCE, number, nbytes, fingerprint)
        self._reduced = hash((self._reduced, number, fingerprint, comm.world_size))
        return None

    def agree_on_missing(self, comm: Communicator, number: int, parameter: int) -> None:
        """Report that this rank has no values for a parameter of a unit, because others may be about to gather it."""
        if comm.exchanges:
            with heartbeat.inside("agreement before a gather", comm.name, 0, self.model.names[number]):
                self._agree(comm, MISSING, number, parameter)

    @property
    def compares(self) -> bool:
        """Whether ranks meet before they clip, as on gloo."""
        return any(comm.exchanges for comm in self._axes(CLIP))

    def agree_all(
        self,
        event: int,
        number: int,
        facts: Mapping[dist.ProcessGroup, tuple[int, int]] | None = None,
    ) -> None:
        """Agree with every rank of the meshes, axis by axis. ``facts``: two numbers for the ranks of an axis, which
        must be equal on them, too."""
        axes = self._axes(event)
        meetings = [comm.meeting for comm in axes if comm.meeting is not None]
        if event not in ENDS:  # no forward has begun since the last one, which may have failed
            for meeting in meetings:
                meeting.enter()
        for i, comm in enumerate(axes):
            met = comm.meeting.number if comm.meeting is not None else 0
            if event in ENDS and comm is axes[-1] and comm.meeting is not None:
                self._last_meeting = comm.meeting, met + 1
            try:
                if comm.exchanges:
                    with heartbeat.inside(_MEETINGS[event], comm.name, 0, self.model.names[number]):
                        own = (0, 0) if facts is None or comm.group is None else facts.get(comm.group, (0, 0))
                        self._agree(comm, event, number, *own)
            except BaseException as error:
                if comm.meeting is not None and not isinstance(error.__cause__, Unreached):
                    comm.meeting.agreed(_limit_of(event))  # if it was interrupted, it may still run
                # The others also meet on the remaining axes, or leave the step and report that in all groups.
                over = {c.meeting for c in axes[: i + 1]}
                if event in ENDS:
                    # Those with whom this rank has agreed already may go on to the next forward or backward.
                    over = {comm.meeting} if isinstance(error.__cause__, Unreached) else set()
                    met_here = comm.meeting is not None and comm.meeting.number > met
                    if met_here and event == END_BACKWARD and comm is axes[-1]:
                        raise  # an interrupt after all have agreed: they have made the step
                    self._last_meeting = None
                rest = [each for each in dict.fromkeys((*meetings, *self._meetings())) if each not in over]
                self._leave(event, error, rest, _failure(meetings))
                if event in ENDS:
                    self._running = None
                raise
        if event in ENDS:
            self._running = None
            if self._differs is None:
                self._forget_edits()

    def _axes(self, event: int) -> list[Communicator]:
        """The axes over which the ranks agree on an event. The norm of clipping has sums over all axes."""
        return [*self.model.every, *self.model.beside] if event == CLIP else self.model.every

    def _agree(self, comm: Communicator, event: int, number: int, nbytes: int = 0, detail: int = 0) -> None:
        """Raise if the next action of another rank differs."""
        try:
            if event in ENDS:
                detail = int(self._edits.get(comm, 0))
            record = Record(event, number, nbytes, detail, self.model.number, self.steps.age)
            records = comm.exchange(record, _limit_of(event))
        except Unreached as error:
            way_out = f" {reading.way_out(FULL)}" if event == UNSHARD else ""
            raise RuntimeError(
                f"Rank {comm.ranks[comm.rank]} {DOING[event][0]} {self.model.name_of(number)}, and {error}{way_out}"
            ) from error
        if records is not None:
            self.model.refuse_rows(comm, records)
        if self.steps.age < 0:
            self.refuse_if_interrupted()

    def refuse_if_interrupted(self) -> None:
        """Raise if a step of an optimizer did not end. In a forward this comes after the ranks have met, so that those
        whose step has ended raise, too."""
        if self.steps.interrupted:
            raise RuntimeError(
                f"A step of an optimizer of {self.model.name_of(0)} was interrupted by an exception, so some of its "
                "weights and some of the optimizer's state may be new and others old. Load a checkpoint of model and "
                "optimizer on every rank (load_checkpoint, or load_state_dict of both), or start again."
            )

    # -- leaving by an exception ---------------------------------------------------------------------------------

    def enter(self, event: int) -> bool:
        """Begin a forward or backward, which ``event`` ends. Returns whether the model's groups had failures since the
        last time."""
        if any(comm.exchanges for comm in self.model.every):
            if self._running is not None:
                self._leave_interrupted(self._running)
            self._last_meeting, self._running = None, event
            self._meeting_numbers = {meeting: meeting.number for meeting in self._meetings()}
            for meeting in self._meeting_numbers:
                meeting.enter()
        before, self._failures = self._failures, sum(meeting.failures for meeting in self._meeting_numbers)
        return self._failures != before

    def leave(self, event: int, error: BaseException) -> None:
        """Report that this rank leaves the forward or backward that ``event`` ends, in the next meeting of the others.

        If ranks have met since it began, all take part in it and come to its end on every axis, also after a
        disagreement. Otherwise they may not take part, and this rank's next meeting reports it.
        """
        meeting_numbers = self._meeting_numbers
        for meeting in meeting_numbers:
            meeting.settle()
            meeting.agreed()
        if any(m.number > number or m.disagreed() for m, number in meeting_numbers.items()):
            self._leave(event, error, list(meeting_numbers), _failure(list(meeting_numbers)))
        self._meeting_numbers, self._running = {}, None

    def _leave_interrupted(self, event: int) -> None:
        """Finish to leave a forward or backward, because an exception came while this rank left it."""
        last = self._last_meeting
        if last is None or last[0].number < last[1]:
            self.leave(event, RuntimeError("an exception in its cleaning up"))
        self._running = None

    def _leave(self, event: int, error: BaseException, meetings: list[Meeting], failure: int) -> None:
        agreed_meetings = [meeting for meeting in meetings if meeting.agreed()]
        if not agreed_meetings:
            return
        notices.post(f"has left {LEFT_BY[event]} {self.model.name_of(0)} by {notices.describe(error)}")
        for meeting in agreed_meetings:
            meeting.leave(failure, (event, self.model.number, self.steps.age))

    def _meetings(self) -> list[Meeting]:
        """The meetings of all groups over which units communicate."""
        comms = [*self.model.every, *(comm for unit in self.model.units() for comm in unit.communicators())]
        return list(dict.fromkeys(c.meeting for c in comms if c.exchanges and c.meeting is not None))

    # -- on an accelerator ---------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Compare this backward's gathers and reductions over the ranks, on the device, beside the computation.

        A model on one rank has nothing to compare.
        """
        streams, reduced = self.streams, self._reduced
        self._reduced = 0
        if self._differs is None:
            return
        # Edits come from the computation. Without them nothing waits for it.
        with streams.fork("gather") if self._is_edited else streams.beside("gather"):
            differs = self._headers.differ()
            for comm in self.model.every:
                mine = self._headers.mine(self._edits[comm])
                mine[:1].fill_(reduced)  # an assignment makes the host wait
                self._orders[comm] = order = self._beside[comm].gather_row(mine)
                differs = differs | (order != order[comm.rank]).any()
            self._differs.set_on_stream(differs)
            self._edits_are_compared = not streams.capturing
            self._interruption_is_compared = self.steps.interrupted

    def replayed(self) -> None:
        """A graph with a backward has been put on the current stream. The next check waits for the graph's end."""
        values_replayed()
        if self._differs is not None:
            self._differs.set_by_graph()
            self._edits_are_compared = True

    def check(self) -> None:
        """Raise if a comparison since the last check found a difference.

        On an accelerator with several ranks the host waits for the last comparison, behind the last gather. Does
        nothing in a capture: the flag is checked outside.
        """
        if self.streams.capturing:
            return
        check_values()
        if self._differs is None:
            if not self.model.every:
                self.refuse_if_interrupted()
            return
        if not self._differs.read():
            if self._interruption_is_compared:
                self.refuse_if_interrupted()
            if self._edits_are_compared:
                self._forget_edits()
            return
        for unit in self.model.units():
            place = unit.weights.place
            if unit.parameters and place is not None and place.home.agreement is self:
                place.check_headers(unit.comm)
        for comm, order in self._orders.items():
            records = [Record(END_BACKWARD, 0, 0, 0, self.model.number, age) for age in order[:, 1].tolist()]
            if len(set(records)) > 1:
                self.model.refuse(dict(zip(comm.ranks, records, strict=True)))
            edits = order[:, 2].tolist()
            if len(set(edits)) > 1:
                self.model.refuse_edits(dict(zip(comm.ranks, edits, strict=True)))
        raise RuntimeError(
            f"The ranks have diverged: in the last backward of {self.model.name_of(0)} they reduced gradients of "
            "different units or parameters, or in different orders. Every rank must use the outputs of the same "
            "units and have the same requires_grad."
        )

    def diverged_gathers(self, comm: Communicator, headers: list[tuple[int, ...]]) -> NoReturn:
        """Raise, given the numbers of the gathered units of all ranks and the ages of their weights."""
        self._headers.forget()
        records = [Record(GATHER, number, 0, 0, self.model.number, age) for number, age in headers]
        self.model.refuse(dict(zip(comm.ranks, records, strict=True)))


#: The agreements that are no part of another collective, on heartbeats.
_MEETINGS = {
    END_FORWARD: "agreement at the end of forward",
    END_BACKWARD: "agreement at the end of backward",
    CLIP: "agreement before clipping",
    UNSHARD: "agreement before full parameters",
}


def _limit_of(event: int) -> timedelta | None:
    """The time that a rank waits for the others before this event; None: the group's timeout."""
    return reading.LIMIT_OF_FULL if event == UNSHARD else None


def _failure(meetings: list[Meeting]) -> int:
    """The failure with which this rank leaves: a failure of others that it knows, or its earlier one, or a new one."""
    for meeting in meetings:
        if meeting.disagreed():
            return meeting.failure
    return next((m.left_by for m in meetings if m.left_by), 0) or new_failure()
