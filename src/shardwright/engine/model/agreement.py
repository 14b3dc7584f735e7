"""How the ranks of a model find that they have diverged: what each is about to do, and how old its weights are.

On gloo they show each other a record before each collective, since a wrong pairing aborts the process or hangs. On an
accelerator the host must not wait: numbers travel with the gathers, are compared on the device, and one flag is read
before the next step. Nothing here gathers or reduces weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch

from shardwright.comm import LEFT, Communicator, Meeting, Unreached, new_failure, notices
from shardwright.engine.model.headers import Headers
from shardwright.engine.tensors import reading
from shardwright.engine.tensors.reading import FULL, READ, refuse_divergence
from shardwright.engine.unit.unit import Unit

#: What ranks are about to do, in the records they exchange. The texts go into the error that names who diverged.
GATHER, REDUCE, END_FORWARD, END_BACKWARD, CLIP, UNSHARD, MISSING = range(READ)
_DOING = (
    ("gathers", "gather"),
    ("reduces the gradients of", "reduce the gradients of"),
    ("ends the forward of", "end the forward of"),
    ("ends the backward of", "end the backward of"),
    ("clips the gradients of", "clip the gradients of"),
    ("shows the full parameters of", "show the full parameters of"),
    ("has no values for", "have no values for"),
    ("reads a number of", "read a number of"),
    ("has left", "have left"),
)
#: What a rank has left by an exception, by what would have ended it.
_LEFT = {
    END_FORWARD: "the forward of",
    END_BACKWARD: "the backward of",
    CLIP: "the clipping of gradients of",
    UNSHARD: "the gathering of full parameters of",
}

_agreements: weakref.WeakSet[Agreement] = weakref.WeakSet()


class Record(NamedTuple):
    """What a rank is about to do, as it shows the others before a collective."""

    event: int
    number: int  #: of the unit
    nbytes: int
    detail: int  #: which parameters (of a reduction; of a gather those with fsdp_pre_all_gather), or what was left
    model: int
    age: int


class Agreement:
    """That of the units of one model.

    Attributes:
        every: one communicator for each axis of more than one rank of any unit's mesh, in one order on every rank.
        age: steps of optimizers since the weights were made or loaded.
        flag: on an accelerator, whether the ranks have diverged; it is there after ``flag_mark``.
    """

    def __init__(self, units: list[Unit], names: list[str]) -> None:
        self._units = [weakref.ref(u) for u in units]
        self._names = names
        self._ranks = units[0].ranks
        self.streams = self._ranks.comm.streams
        self.every = list(dict.fromkeys(comm for unit in units for comm in unit.ranks.every))
        self._model = -1
        self.age = 0
        self.flag: torch.Tensor | None = None
        self.flag_mark: Any = None
        self._reduced = 0  #: stands for the reductions of the backward under way, in their order
        #: For each axis, what every rank has sent at the end of the last backward: that number, and its age.
        self._orders: dict[Communicator, torch.Tensor] = {}
        #: Where the ranks meet, and how often they had met when the forward or backward under way began.
        self._met: dict[Meeting, int] = {}
        self._headers = Headers([unit.comm for unit in units], self._ranks.device, self.streams)

    def begin(self) -> None:
        """The model is complete: give it its number."""
        self._model = (*self.every, self._ranks.local)[0].number_of_model()
        _agreements.add(self)

    def name_of(self, number: int) -> str:
        known = 0 <= number < len(self._names)
        return f"unit {number} ({self._names[number]!r})" if known else f"unknown unit {number}"

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
        for i, comm in enumerate(self.every):
            try:
                if comm.exchanges:
                    self._agree(comm, event, number)
            except BaseException as error:
                if comm.meeting is not None and not isinstance(error.__cause__, Unreached):
                    comm.meeting.agreed(_limit_of(event))  # interrupted, it may be under way
                # The others come to those axes that are left, and nowhere else.
                rest = [c.meeting for c in self.every[i + 1 :] if c.meeting is not None]
                self._leave(event, error, rest, _failure([c.meeting for c in self.every if c.meeting]))
                raise

    def _agree(self, comm: Communicator, event: int, number: int, nbytes: int = 0, detail: int = 0) -> None:
        """Raise if another rank is about to do something else."""
        try:
            record = Record(event, number, nbytes, detail, self._model, self.age)
            records = comm.exchange(record, _limit_of(event))
        except Unreached as error:
            way_out = f" {reading.way_out(FULL)}" if event == UNSHARD else ""
            raise RuntimeError(
                f"Rank {comm.ranks[comm.rank]} {_DOING[event][0]} {self.name_of(number)}, and {error}{way_out}"
            ) from error
        if records is not None:
            self.refuse(comm, records)

    def refuse(self, comm: Communicator, rows: list[list[int]]) -> NoReturn:
        """Raise, given what the ranks have shown each other."""
        records = {rank: Record(*row) for rank, row in zip(comm.ranks, rows, strict=True)}
        _refuse_missing(self, records, self._units)
        self._refuse(records)

    # -- leaving by an exception ---------------------------------------------------------------------------------

    def enter(self) -> int:
        """A forward or backward begins. Returns how many failures there have been in the model's groups."""
        if any(comm.exchanges for comm in self.every):
            self._met = {meeting: meeting.number for meeting in self._meetings()}
            for meeting in self._met:
                meeting.left_by = 0
        return sum(meeting.failures for meeting in self._met)

    def leave(self, event: int, error: BaseException) -> None:
        """This rank leaves what ``event`` ends: show it where the others come next.

        If ranks have met since it began, all are in it, and come to its end on every axis; also if they did not agree,
        as ranks whose weights are of different ages. Else they may have no part in it, and this rank's next meeting
        shows it.
        """
        met, self._met = self._met, {}
        for meeting in met:
            meeting.settle()
            meeting.agreed()
        if any(m.number > number or m.disagreed() for m, number in met.items()):
            self._leave(event, error, list(met), _failure(list(met)))

    def _leave(self, event: int, error: BaseException, meetings: list[Meeting], failure: int) -> None:
        left = [meeting for meeting in meetings if meeting.agreed()]
        if not left:
            return
        notices.post(f"has left {_LEFT[event]} {self.name_of(0)} by {notices.describe(error)}")
        for meeting in left:
            meeting.leave(failure, (event, self._model, self.age))

    def _meetings(self) -> list[Meeting]:
        """Of all groups over which units communicate."""
        units = [unit for ref in self._units if (unit := ref()) is not None]
        comms = [*self.every, *(comm for unit in units for comm in unit.communicators())]
        found = {comm.meeting: None for comm in comms if comm.exchanges and comm.meeting is not None}
        return list(found)

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
            for comm in self.every:
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
        for unit in (u for ref in self._units if (u := ref()) is not None):
            place = unit.weights.place
            if unit.parameters and place is not None and place.home.agreement is self:
                place.check_headers(unit.comm)
        for comm, order in self._orders.items():
            records = [Record(END_BACKWARD, 0, 0, 0, self._model, age) for age in order[:, 1].tolist()]
            if len(set(records)) > 1:
                self._refuse(dict(zip(comm.ranks, records, strict=True)))
        raise RuntimeError(
            f"The ranks have diverged: in the last backward of {self.name_of(0)} they reduced the gradients of "
            "different units or parameters, or in another order. Every rank must use the outputs of the same units "
            "and have the same requires_grad."
        )

    def diverged_gathers(self, comm: Communicator, headers: list[tuple[int, ...]]) -> NoReturn:
        """The ranks gathered units of these numbers, with weights of these ages."""
        self._headers.forget()
        records = [Record(GATHER, number, 0, 0, self._model, age) for number, age in headers]
        self._refuse(dict(zip(comm.ranks, records, strict=True)))

    # -- errors --------------------------------------------------------------------------------------------------

    def _refuse(self, records: dict[int, Record]) -> NoReturn:
        """Raise, given what each rank is about to do."""
        first = next(iter(records.values()))
        one_age = len({r.age for r in records.values() if r.event != READ}) == 1
        same_place = len({(r.event, r.number, r.model) for r in records.values()}) == 1
        same_size = len({r.nbytes for r in records.values()}) == 1
        if same_place and one_age and first.event == GATHER and len({r.detail for r in records.values()}) > 1:
            details = _grouped({rank: r.detail for rank, r in records.items()})
            groups = "; ".join(
                f"{'some' if detail else 'none'} on {_ranks(ranks)}" for detail, ranks in details
            )
            raise RuntimeError(
                f"The ranks have diverged: they gather {self.name_of(first.number)} with fsdp_pre_all_gather on "
                f"different parameters ({groups}). Attach it to the local tensors of the same parameters on every rank."
            )
        if same_place and same_size and one_age:
            raise RuntimeError(
                f"The ranks have diverged: they reduce gradients of different parameters of "
                f"{self.name_of(first.number)}. requires_grad must be the same on every rank."
            )
        doing = _grouped({rank: self._describe(rank, r, records.values()) for rank, r in records.items()})
        text = "; ".join(f"{_ranks(ranks)} {verbs[len(ranks) > 1]} {what}" for (verbs, what), ranks in doing)
        unit = self._units[first.number]() if same_place and not same_size else None
        if unit is not None and first.event == REDUCE:
            text += " (of other parameters: requires_grad must be the same on every rank)"
        elif unit is not None and unit.weights.copies.extended_kinds:
            kinds = unit.weights.copies.extended_kinds
            text += f" (fsdp_pre_all_gather of {kinds} must return equal sizes on every rank)"
        left = any(r.event == LEFT for r in records.values())
        way_out = _WAY_OUT_OF_LEAVING if left else _WAY_OUT if one_age else _WAY_OUT_OF_AGES
        raise RuntimeError(f"The ranks have diverged: {text}. {way_out}")

    def _describe(self, rank: int, record: Record, among: Collection[Record]) -> tuple[tuple[str, str], str]:
        """What a rank is about to do, in the singular and in the plural, and with what."""
        if record.event == READ and record.number == FULL:
            return ("gathers", "gather"), "full parameters (unsharded)"
        if record.event == READ:
            return _DOING[READ], "a sharded tensor (norm, sum, item, float)"
        models, ages = ({r[place] for r in among if r.event != READ} for place in (-2, -1))
        places, sizes = {(r.event, r.number, r.model) for r in among}, {r.nbytes for r in among}
        agreement = next((a for a in _agreements if a._is_model(record.model, self)), self)
        what = agreement.name_of(record.number)
        if record.event == LEFT:
            said = notices.read([rank]).get(rank, "")
            reason = said.rpartition(f"{what} by ")[2] if f"{what} by " in said else "an exception"
            return _DOING[LEFT], f"{_LEFT[record.detail]} {what} by {reason}"
        what += f" of the group's model {record.model} ({agreement._names[0]!r})" if len(models) > 1 else ""
        what += f" of {record.nbytes} bytes" if len(places) == 1 and len(sizes) > 1 else ""
        what += f" after {_steps(record.age)}" if len(ages) > 1 else ""
        return _DOING[record.event], what

    def _is_model(self, model: int, beside: Agreement) -> bool:
        return self._model == model and self._ranks.same(beside._ranks)


_WAY_OUT = "Every rank must run the same units, of the same sizes, in the same order in each step."
_WAY_OUT_OF_LEAVING = "The others cannot go on without it: where one rank leaves a step, all must."
_WAY_OUT_OF_AGES = (
    "Their weights are of different ages. Every rank must make the same steps of optimizers: where one skips a step (a "
    "loss that is not finite, another number of micro-batches), all must. Load a state dict into the model on every "
    "rank, or start again."
)


def _refuse_reading(comm: Communicator, rows: list[list[int]]) -> None:
    """Some ranks read a number of a sharded tensor while the others go on with a model: raise in its words."""
    for agreement in _agreements:
        if any(each.ranks == comm.ranks for each in agreement.every):
            agreement.refuse(comm, rows)


refuse_divergence.append(_refuse_reading)


def _limit_of(event: int) -> timedelta | None:
    """How long a rank waits for the others before it; None: for the group's timeout."""
    return reading.LIMIT_OF_FULL if event == UNSHARD else None


def _grouped(values: dict[int, Any]) -> Iterable[tuple[Any, list[int]]]:
    """Each value with the ranks that have it."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks.items()


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def _steps(age: int) -> str:
    return f"{age} optimizer step" if age == 1 else f"{age} optimizer steps"


def _refuse_missing(agreement: Agreement, records: dict[int, Record], units: list[weakref.ref[Unit]]) -> None:
    """Raise if some ranks have no values for what the others are about to gather."""
    ranks = [rank for rank, r in records.items() if r.event == MISSING]
    if not ranks or len({(r.number, r.model) for r in records.values()}) > 1:
        return
    place, number = records[ranks[0]].nbytes, records[ranks[0]].number
    unit = units[number]()
    name = unit.parameters[place].name if unit is not None and place < len(unit.parameters) else "?"
    raise RuntimeError(
        f"Parameters {name!r} of {agreement.name_of(number)} hold no values yet on {_ranks(ranks)}, since they were "
        "sharded deferred or on the meta device. Every rank must give its part values: call "
        "shardwright.materialize(model), load a checkpoint, or fill to_local() on each."
    )


def _failure(meetings: list[Meeting]) -> int:
    """That by which this rank leaves: the others', if it has heard of one, or one that it has left by already."""
    for meeting in meetings:
        if meeting.disagreed():
            return meeting.failure
    return next((m.left_by for m in meetings if m.left_by), 0) or new_failure()
