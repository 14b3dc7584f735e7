"""The errors for ranks of a model that have diverged, made from the records of their next actions."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple, NoReturn

from shardwright.engine.comm import LEFT, Communicator, notices
from shardwright.engine.heartbeat import ranks_in_words
from shardwright.engine.tensors.numbers.reading import KINDS, READ, refuse_divergence
from shardwright.engine.tensors.ranks import Ranks
from shardwright.engine.unit.unit import Unit

#: Next actions in the records that ranks exchange. The texts appear in errors.
GATHER, REDUCE, END_FORWARD, END_BACKWARD, CLIP, UNSHARD, MISSING = range(READ)
DOING = (
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
#: At these events ``Record.detail`` is a hash of the rank's edits of full weights.
ENDS = (END_FORWARD, END_BACKWARD)
#: Names of the work that a rank has left with an exception, by the event that would have ended it.
LEFT_BY = {
    END_FORWARD: "the forward of",
    END_BACKWARD: "the backward of",
    CLIP: "the clipping of gradients of",
    UNSHARD: "the gathering of full parameters of",
}

_WAY_OUT = (
    "Every rank must run the same units, of the same sizes, in the same order in each step. Reasons why ranks differ: "
    "a branch that depends on a rank's data, a loss that leaves out a unit, requires_grad, or "
    "set_requires_gradient_sync."
)
_WAY_OUT_OF_LEAVING = (
    "The other ranks cannot continue without it. If one rank leaves a step, all ranks must leave it."
)
_WAY_OUT_OF_AGES = (
    "Some ranks have older weights than others. Every rank must make the same optimizer steps: if one rank skips a "
    "step (a loss that is not finite, another number of micro-batches), all ranks must skip it. Load a state dict "
    "into the model on every rank, or start again."
)

_models: weakref.WeakSet[Model] = weakref.WeakSet()
#: Models over a group so far, by its name; equal on all ranks if they make models in the same order. Communicators do
#: not hold it, because ranks may collect their models at different times.
_counts: Counter[str] = Counter()


class Record(NamedTuple):
    """The next action of a rank, as it sends it before a collective."""

    event: int
    number: int  #: of the unit
    nbytes: int
    detail: int  #: a number for the parameters, for edits, or for what was left; of a gather see ``Gather.detail``
    model: int
    age: int


class Model:
    """The names of a model and its units in errors.

    Attributes:
        names: of the units.
        every: one communicator for each axis with several ranks of any unit's mesh, in the same order on every rank.
        number: of the model in its group of ranks; -1 until the model is complete.
    """

    def __init__(self, units: list[Unit], names: list[str], ranks: Ranks) -> None:
        self._units = [weakref.ref(u) for u in units]
        self.names = names
        self._ranks = ranks
        self.every = list(dict.fromkeys(comm for unit in units for comm in unit.ranks.every))
        self._device = ranks.device
        self.number = -1
        #: Units and names of parameters of which this rank has changed the full form since the last agreement.
        self.edited: dict[tuple[int, str], None] = {}
        first = (*self.every, ranks.local)[0].group
        self._group = first.group_name if first is not None else ""

    @functools.cached_property
    def beside(self) -> list[Communicator]:
        """One communicator for each other axis with several ranks on which parameters are, as of tensor parallelism."""
        parallel = (p.cut.parallel for unit in self.units() for p in unit.parameters)
        groups = dict.fromkeys(group for each in parallel if each is not None for group in each.axes)
        known = {comm.group for comm in self.every}
        return [Communicator(group, self._device) for group in groups if group not in known]

    def begin(self) -> None:
        """Count the model, because it is complete."""
        _counts[self._group] += 1
        self.number = _counts[self._group]
        _models.add(self)

    def abandon(self) -> None:
        """Uncount the model, because it was not completed. The next model gets its number."""
        if self.number > 0:
            _counts[self._group] = self.number - 1

    def units(self) -> list[Unit]:
        return [unit for ref in self._units if (unit := ref()) is not None]

    def name_of(self, number: int) -> str:
        is_unit = 0 <= number < len(self.names)
        return f"unit {number} ({self.names[number]!r})" if is_unit else f"unknown unit {number}"

    def refuse_rows(self, comm: Communicator, rows: list[list[int]]) -> NoReturn:
        """Raise, given the ranks' records from before a collective."""
        records = {rank: Record(*row) for rank, row in zip(comm.ranks, rows, strict=True)}
        self._refuse_missing(records)
        self.refuse(records)

    def _refuse_missing(self, records: dict[int, Record]) -> None:
        """Raise if some ranks have no values for parameters that the others are about to gather."""
        ranks = [rank for rank, r in records.items() if r.event == MISSING]
        if not ranks or len({(r.number, r.model) for r in records.values()}) > 1:
            return
        place, number = records[ranks[0]].nbytes, records[ranks[0]].number
        unit = self._units[number]()
        name = unit.parameters[place].name if unit is not None and place < len(unit.parameters) else "?"
        raise RuntimeError(
            f"Parameters {name!r} of {self.name_of(number)} hold no values yet on {ranks_in_words(ranks)}, since they "
            "were sharded deferred or on the meta device. Give values to the parts of every rank: call "
            "shardwright.materialize(model), load a checkpoint, or fill to_local() on each rank."
        )

    def refuse(self, records: dict[int, Record]) -> NoReturn:
        """Raise, given the next action of each rank."""
        first = next(iter(records.values()))
        one_age = len({r.age for r in records.values() if r.event != READ}) == 1
        same_place = len({(r.event, r.number, r.model) for r in records.values()}) == 1
        same_size = len({r.nbytes for r in records.values()}) == 1
        if same_place and one_age and first.event == GATHER and len({r.detail for r in records.values()}) > 1:
            ways, extended = (
                _grouped({rank: r.detail >> shift & 0xFFFFFFFF for rank, r in records.items()})
                for shift in (32, 0)
            )
            if len(ways) > 1:
                raise RuntimeError(
                    f"The ranks have diverged: they gather {self.name_of(first.number)} with different codecs or "
                    f"collectives ({_some_or_none(ways)}). Call set_all_gather_codec and set_custom_all_gather with "
                    "equal arguments on every rank."
                )
            groups = _some_or_none(extended)
            raise RuntimeError(
                f"The ranks have diverged: they gather {self.name_of(first.number)} with fsdp_pre_all_gather on "
                f"different parameters ({groups}). Attach it to the local tensors of the same parameters on every rank."
            )
        if same_place and one_age and first.event == CLIP:
            counts = _grouped({rank: r.nbytes for rank, r in records.items()})
            which = "; ".join(f"{count} gradients on {ranks_in_words(ranks)}" for count, ranks in counts)
            raise RuntimeError(
                "The ranks have diverged: they clip gradients of different parameters"
                f"{f' ({which})' if len(counts) > 1 else ''}. Call clip_grad_norm_ with the same parameters in the "
                "same order on every rank."
            )
        if same_place and same_size and one_age and first.event not in ENDS:
            raise RuntimeError(
                f"The ranks have diverged: they reduce gradients of different parameters of "
                f"{self.name_of(first.number)}. requires_grad must be the same on every rank."
            )
        if same_place and one_age and first.event in ENDS:
            self.refuse_edits({rank: r.detail for rank, r in records.items()})
        doing = _grouped({rank: self._describe(rank, r, records.values()) for rank, r in records.items()})
        text = "; ".join(
            f"{ranks_in_words(ranks)} {verbs[len(ranks) > 1]} {what}" for (verbs, what), ranks in doing
        )
        unit = self._units[first.number]() if same_place and not same_size else None
        layout = unit.arguments.layout if unit is not None else None
        if layout is not None and callable(layout.granule) and first.event in (GATHER, REDUCE):
            text += (
                f" (layout {layout}: its function must return the same number for a shape on every rank; "
                "check_module_states=True names the parameters)"
            )
        elif unit is not None and first.event == REDUCE:
            text += " (of other parameters: requires_grad must be the same on every rank)"
        elif unit is not None and unit.weights.copies.extended_kinds:
            kinds = unit.weights.copies.extended_kinds
            text += f" (fsdp_pre_all_gather of {kinds} must return equal sizes on every rank)"
        left = any(r.event == LEFT for r in records.values())
        way_out = _WAY_OUT_OF_LEAVING if left else _WAY_OUT if one_age else _WAY_OUT_OF_AGES
        raise RuntimeError(f"The ranks have diverged: {text}. {way_out}")

    def refuse_edits(self, hashes: dict[int, int]) -> NoReturn:
        """Raise because ranks have written different values into full weights. ``hashes``: of each rank's edits."""
        names = " and ".join(f"parameter {name!r} of {self.name_of(number)}" for number, name in self.edited)
        which = "; ".join(ranks_in_words(ranks) for _, ranks in _grouped(hashes))
        raise RuntimeError(
            f"The ranks have diverged: {names or 'a parameter (not on this rank)'} was changed in place while it was "
            f"full, to other values on each of: {which}. Each shard would keep another rank's values. "
            "Compute the change from the data of all ranks, for example reduce the statistics with "
            "torch.distributed.all_reduce before it. Or keep the tensor as a buffer, which shardwright does not shard. "
            "Then load a state dict into the model on every rank, or start again."
        )

    def _describe(self, rank: int, record: Record, among: Collection[Record]) -> tuple[tuple[str, str], str]:
        """The next action of a rank in words, in the singular and in the plural, and its object."""
        if record.event == READ:
            return KINDS[record.number].verbs, KINDS[record.number].thing
        models, ages = ({r[place] for r in among if r.event != READ} for place in (-2, -1))
        places, sizes = {(r.event, r.number, r.model) for r in among}, {r.nbytes for r in among}
        model = next((m for m in _models if m._is(record.model, self)), self)
        what = model.name_of(record.number)
        if record.event == LEFT:
            notice = notices.read([rank]).get(rank, "")
            reason = notice.rpartition(f"{what} by ")[2] if f"{what} by " in notice else "an exception"
            return DOING[LEFT], f"{LEFT_BY[record.detail]} {what} by {reason}"
        what += f" of the group's model {record.model} ({model.names[0]!r})" if len(models) > 1 else ""
        what += f" of {record.nbytes} bytes" if len(places) == 1 and len(sizes) > 1 else ""
        what += f" after {_steps(record.age)}" if len(ages) > 1 else ""
        return DOING[record.event], what

    def _is(self, number: int, beside: Model) -> bool:
        return self.number == number and self._ranks.same(beside._ranks)


def _refuse_reading(comm: Communicator, rows: list[list[int]]) -> None:
    """Raise for ranks that read a number of a sharded tensor while others run a unit of a model."""
    for model in _models:
        if any(each.ranks == comm.ranks for each in model.every):
            model.refuse_rows(comm, rows)


refuse_divergence.append(_refuse_reading)


def _some_or_none(numbers: Collection[tuple[int, list[int]]]) -> str:
    return "; ".join(
        f"{'some' if number else 'none'} on {ranks_in_words(ranks)}" for number, ranks in numbers
    )


def _grouped(values: dict[int, Any]) -> Collection[tuple[Any, list[int]]]:
    """Each value with the ranks that have it."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks.items()


def _steps(age: int) -> str:
    if age < 0:
        return "an interrupted optimizer step"
    return f"{age} optimizer step" if age == 1 else f"{age} optimizer steps"
