"""The root: what the units of one model share. Order, prefetch, and the beginnings and ends of forward and backward.

Any unit may be called first; the outermost call is the root call. The order seen in one root call is the guess for
the next. A guess moves a gather earlier and nothing else: every unit still checks that its slab is of this call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright._torch import alone, annotate, increment_version, queue_callback, subclasses_dispatch
from shardwright.comm import Communicator
from shardwright.engine.construct import UNIT, own_modules
from shardwright.engine.full_precision import check_agree, wanted
from shardwright.engine.gradients import Announcer, Reduction
from shardwright.engine.offload import Arrivals, refuse_state_on_device
from shardwright.engine.parameter import (
    DEFERRED,
    TAKEN,
    UNIT_OF,
    Managed,
    RaggedParameter,
    ShardedParameter,
    unit_of,
)
from shardwright.engine.pools import Pools, prefetch_budget
from shardwright.engine.precision import cast_buffers, refuse_gradient_dtypes
from shardwright.engine.reading import READ, refuse_divergence
from shardwright.engine.unit import Unit
from shardwright.engine.visit import Frame, Visit
from shardwright.engine.weights import Weights

_roots: weakref.WeakSet[Root] = weakref.WeakSet()

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
)


class Root:
    """Shared state of the units below one module. Units refer to it; it refers to them weakly."""

    def __init__(self, units: list[Unit], names: list[str]) -> None:
        self._units = [weakref.ref(u) for u in units]
        self._names = names
        self.gathered: set[int] = set()
        self.generation = 0
        self.calls_begun = 0  #: root calls so far
        self.caller: Unit | None = None
        self.full_precision_in_eval = check_agree(units, names)
        self.full_precision = False  #: of the root call under way, or the last one
        self.frames: list[Frame] = []  #: calls of units under way, the innermost last
        self.open_visits: list[Visit] = []  #: whose backward is under way
        self.backward = False
        self._task: weakref.ref[_Task] | None = None
        self.is_last_backward = True
        self.selects = False  #: whether backward runs only what leads to tensors that the user has selected
        self.max_input_buffers = 1
        self.scattering: list[
            int
        ] = []  #: units whose gradients' reduce-scatter is under way, the oldest first
        self._summing: list[int] = []  #: units whose gradients are being summed over the replicas
        self.arrivals = Arrivals()
        self.observer: Callable[[str, Weights], None] | None = None
        self._orders: dict[int, list[int]] = {}  # by caller: units in the order of its last root call
        self._expected: list[int] = []  # that of the caller of the root call under way
        self._place = 0
        self._seen: list[int] = []
        self._left: list[int] = []
        self._visits: dict[int, Visit] = {}
        self._clock = 0
        self.ranks = units[0].ranks
        #: One for each axis of more than one rank of any unit's mesh, in the same order on every rank.
        self.every = list(dict.fromkeys(comm for unit in units for comm in unit.ranks.every))
        self.streams = self.ranks.comm.streams
        top = units[0]
        self.prefetch, self.prefetch_bytes = prefetch_budget(top.prefetch)
        self.pools = Pools(top.memory, self.prefetch, top.strict)
        #: The order of a caller that was not called yet, for plans to be made of its first step.
        self._guess = [n for n, unit in enumerate(units) if unit.parameters] if self.pools.planned else []
        try:
            self._make_headers(units)
            self.pools.join(units)
        except BaseException:  # so that the next call makes a root again
            for unit in units:
                unit.root = None
            raise
        #: Last, so that a rank on which this failed counts as the others do.
        self.serial = (*self.every, self.ranks.local)[0].number_of_model()

    def _make_headers(self, units: list[Unit]) -> None:
        """A place for the numbers that come with each unit's gathers, so that one call compares them all."""
        self.flag: torch.Tensor | None = None  #: on an accelerator: whether the ranks have diverged
        self.flag_mark: Any = None  #: after what the flag is there
        self._reduced = 0  #: stands for the reductions of the backward under way, in their order
        rows = [[number, 0] * unit.comm.world_size for number, unit in enumerate(units)]
        wanted = torch.tensor([word for row in rows for word in row], dtype=torch.int64, device="cpu")
        self._wanted_headers = wanted.to(self.ranks.device)
        self._headers = self._wanted_headers.clone()
        parts = self._headers.split([len(row) for row in rows])
        for number, (unit, headers) in enumerate(zip(units, parts, strict=True)):
            unit.join_root(self, number, self._names[number], headers)

    @property
    def top(self) -> Unit | None:
        """The unit that the module above all others belongs to."""
        return self._units[0]()

    def units(self) -> list[Unit]:
        return [u for ref in self._units if (u := ref()) is not None and u.root is self]

    def name_of(self, number: int) -> str:
        known = 0 <= number < len(self._names)
        return f"unit {number} ({self._names[number]!r})" if known else f"unknown unit {number}"

    def notify(self, event: str, unit: Weights) -> None:
        """Tell whoever listens (tests, recorders) that a gather was issued or awaited."""
        if self.observer is not None:
            self.observer(event, unit)

    # -- forward -------------------------------------------------------------------------------------------------

    def recover_if_failed(self) -> None:
        """If the last backward raised, it never reached its end: drop what it left."""
        if self.backward and not self.in_backward:
            self.recover()

    @property
    def in_backward(self) -> bool:
        """Whether a backward that has reached this model is under way, and has not died."""
        return self.backward and self._task is not None and self._task() is not None

    def begin(self, unit: Unit, module: nn.Module) -> None:
        """The outermost call of this model begins, that of a ``module`` of ``unit``."""
        with annotate("root_pre_forward"):
            self._begin(unit, module)

    def compute_as(self, full_precision: bool) -> None:
        """Gather weights as they are stored from now on, or in their compute dtypes. No call may be under way."""
        if self.full_precision != full_precision:
            try:
                for unit in self.units():
                    unit.compute_as(full_precision)
            except BaseException:
                for unit in self.units():
                    unit.compute_as(self.full_precision)
                raise
            self.full_precision = full_precision

    def _begin(self, unit: Unit, module: nn.Module) -> None:
        self.check_divergence()
        self.recover_if_failed()
        if self.full_precision_in_eval:
            self.compute_as(wanted(module))
        self.generation += 1
        self.calls_begun += 1
        self.caller = unit
        self.frames.clear()
        self._expected = self._orders.get(unit.number, self._guess)
        self._place = 0
        self._seen, self._left = [], []
        for each in self.units():
            if each.parameters:
                each.release_unused_gradients()
        self.pools.begin()

    def forward_reaches(self, unit: Unit) -> None:
        """A unit is about to compute: make sure that it is being gathered, and gather the next one beside it."""
        if not unit.valid_for(self.generation):
            unit.issue(self.generation)
        self._seen.append(unit.number)
        expected, place = self._expected, self._place
        if place < len(expected) and expected[place] == unit.number:
            self._place = place + 1
        else:  # not the order of last time: look for this unit further on, else guess nothing more in this call
            later = expected[place:]
            self._place = place + later.index(unit.number) + 1 if unit.number in later else len(expected)
        if unit.forward_prefetch:
            wanted = [u for ref in unit.forward_prefetch if (u := ref()) is not None]
        else:
            wanted = self._within_budget(expected[self._place : self._place + self.prefetch])
        for other in wanted:
            if other.parameters and other.root is self and not other.valid_for(self.generation):
                other.issue(self.generation)

    def _within_budget(self, numbers: Iterable[int]) -> list[Unit]:
        """These units, as far as the bytes to be gathered ahead go."""
        wanted: list[Unit] = []
        nbytes = 0
        for number in numbers:
            unit = self._units[number]()
            if unit is None:
                break
            nbytes += unit.slab.nbytes
            if self.prefetch_bytes is not None and nbytes > self.prefetch_bytes:
                break
            wanted.append(unit)
        return wanted

    def forward_leaves(self, unit: Unit, visit: Visit | None) -> None:
        if (
            visit is not None and visit.returns
        ):  # in front of all that learns nothing is gathered for backward
            visit.place = len(visit.order)
            visit.order.append(unit.number)

    def tick(self) -> int:
        """The time of this model: a number for every call that begins or ends."""
        self._clock += 1
        return self._clock

    def visit(self, unit: Unit, recomputing: bool) -> Visit:
        """The visit of ``unit`` in this root call; a recomputed call is a visit of its own, outside any order."""
        if recomputing:
            return Visit(unit, [], self.tick())
        visit = self._visits.get(unit.number)
        if visit is None:
            visit = self._visits[unit.number] = Visit(unit, self._left, self.tick())
        return visit

    def host_of(self, frame: Frame) -> Visit | None:
        """The visit of the innermost call around ``frame`` that has one."""
        for other in reversed(self.frames):
            if other is not frame and other.visit is not None and other.visit.unit is not frame.unit:
                return other.visit
        return None

    def end(self) -> None:
        """The outermost call has returned: what was prefetched and not used is dropped."""
        caller, self.caller = self.caller, None
        assert caller is not None
        self._visits = {}
        used = set(self._seen)
        for unit in self._gathered_units():
            if unit.forward_unfinished:
                unit.leave_forward()
            elif unit.number not in used and not unit.kept:
                unit.release()
        self._orders[caller.number] = self._seen
        self._agree_all(END_FORWARD, caller.number)

    def abandon(self) -> None:
        """The outermost call has failed: nothing of it is kept, and its order is no guess for the next."""
        self.caller = None
        self.frames.clear()
        self._visits = {}
        for unit in self.units():
            unit.forget_calls()
            unit.drop_secondary()
        for unit in self._gathered_units():
            unit.release()

    def _gathered_units(self) -> list[Unit]:
        return [
            u for number in sorted(self.gathered, reverse=True) if (u := self._units[number]()) is not None
        ]

    def recover(self) -> None:
        """An exception left a forward or backward unfinished: its slabs and its gradients are dropped."""
        self.arrivals.recover()
        self.caller = None
        self.frames.clear()
        self.open_visits.clear()
        self.backward = False
        self.scattering, self._summing = [], []
        self._reduced = 0
        self._visits = {}
        for unit in self.units():
            unit.recover()

    # -- backward ------------------------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """Backward has reached this model, perhaps for the first time: be called when it ends."""
        self.recover_if_failed()
        if not self.backward:
            task = _Task(self)
            queue_callback(task)
            self._task = weakref.ref(task)
            self.backward = True
            if self.caller is None:
                self.compute_as(False)
            self.generation += 1

    def close_later_visits(self, visit: Visit) -> None:
        """Close visits whose forward began after that of ``visit`` had ended.

        Autograd runs nodes in the reverse of the order in which they were made, so nothing of those is left. Where
        no input of a unit needs a gradient, on this rank or on any, nothing else would say so before the end.
        """
        self.close_visits_begun_after(visit.end)

    def close_visits_begun_after(self, time: int) -> None:
        """Close these, the latest first, whatever the order in which this rank's backward has reached them."""
        later = sorted((v for v in self.open_visits if v.begin > time), key=lambda v: -v.begin)
        for other in later:
            other.unit.close(other)

    def prefetch_backward(self, visit: Visit) -> None:
        """Gather beside this unit's backward the one whose backward comes next."""
        unit = visit.unit
        if unit.backward_prefetch:
            wanted = [u for ref in unit.backward_prefetch if (u := ref()) is not None]
        elif visit.place > 0:
            first = max(0, visit.place - self.prefetch)
            wanted = self._within_budget(reversed(visit.order[first : visit.place]))
        else:
            wanted = []
        for other in wanted:
            if other.parameters and other.root is self and not other.gathered and other.unshard_in_backward:
                other.issue(self.generation, look=False)  # its backward looks

    def make_room(self, number: int) -> None:
        """At most ``max_input_buffers`` packed buffers are alive, and one sum over the replicas is under way.

        Nothing of unit ``number`` is: it may be reduced twice in one backward, and has one place for the result.
        """
        if number in self.scattering or number in self._summing:
            self.finish_reductions()
        begins = self._units[number]()
        if begins is not None and begins.arriving:
            begins.land()
        while len(self.scattering) >= self.max_input_buffers:
            oldest = self.scattering.pop(0)
            unit = self._units[oldest]()
            if unit is None:
                continue
            self._finish_sums()
            if unit.continue_reduction():
                self._summing.append(oldest)
            else:
                unit.finish_reduction()
        if begins is not None and begins.host is not None:
            self.arrivals.poll()

    def _finish_sums(self) -> None:
        while self._summing:
            if (unit := self._units[self._summing.pop(0)]()) is not None:
                unit.finish_reduction()

    def finish_reductions(self) -> None:
        """Everything that is under way is waited for and handed over."""
        numbers, self.scattering = self.scattering, []
        units = [u for number in numbers if (u := self._units[number]()) is not None]
        for unit in units:
            unit.continue_reduction()
        self._finish_sums()
        for unit in units:
            unit.finish_reduction()

    def finish_held(self) -> None:
        """What micro-batches have left was reduced outside of any backward: wait for it."""
        self.finish_reductions()
        self.arrivals.end_backward()

    def alone(self) -> AbstractContextManager[Any]:
        """In which the engine's own operations run: outside of transforms and modes around the call."""
        return alone(self.ranks.device.type)

    def _end_backward(self) -> None:
        """Backward is over: reduce what is left, in one order on all ranks, and leave everything sharded."""
        self.close_visits_begun_after(-1)
        for unit in reversed(self.units()):
            if unit.parameters:
                unit.finish_backward()
        self.finish_reductions()
        self.arrivals.end_backward()
        stepped = self._end_steps()
        for unit in self._gathered_units():
            if not unit.kept and not unit.calls:  # backward may have run inside a forward
                unit.release()
        self.backward = False
        self.generation += 1
        self.pools.trained = True
        if stepped:
            self.pools.step()
        self._agree_all(END_BACKWARD, 0)
        self._compare_headers()

    def _end_steps(self) -> bool:
        """Step in backward what is left to step. Returns whether any unit was, now or before."""
        units = [unit for unit in reversed(self.units()) if unit.stepping is not None]
        for unit in units:
            unit.step_if_due()
        steppers = {id(s): s for unit in units if unit.stepping is not None for s in unit.stepping.steppers}
        return any([stepper.backward_ended() for stepper in steppers.values()])

    # -- ranks that diverge --------------------------------------------------------------------------------------

    def announce_gather(self, unit: Weights, comm: Communicator, nbytes: int) -> Callable[[], None] | None:
        """What is to be called before a gather of ``unit``, when nothing can fail on this rank alone any more."""
        if comm.exchanges:
            return lambda: self._agree(comm, GATHER, unit.number, nbytes)
        return None

    def announcer(self, unit: Unit, reduction: Reduction) -> Announcer:
        """What tells what is to be called before a collective of a reduction."""

        def announce(comm: Communicator, nbytes: int) -> Callable[[], None] | None:
            if comm.exchanges:
                return lambda: self._agree(comm, REDUCE, unit.number, nbytes, reduction.fingerprint)
            self._reduced = hash((self._reduced, unit.number, reduction.fingerprint, comm.world_size))
            return None

        return announce

    def agree_on_clipping(self) -> None:
        """The gradients' norm is about to be summed over the ranks."""
        self._agree_all(CLIP, 0)

    def agree_on_missing(self, unit: Weights, comm: Communicator, parameter: int) -> None:
        """This rank has no values of a parameter of ``unit``, of this place, where others may be about to gather."""
        self._agree(comm, MISSING, unit.number, parameter)

    def agree_on_unsharding(self) -> None:
        """Parameters of this model are about to be gathered to be shown."""
        self._agree_all(UNSHARD, 0)

    def _agree_all(self, event: int, number: int) -> None:
        """Agree with every rank of the meshes, axis by axis."""
        for comm in self.every:
            self._agree(comm, event, number)

    def _agree(self, comm: Communicator, event: int, number: int, nbytes: int = 0, detail: int = 0) -> None:
        """Raise if another rank is about to do something else. On gloo, where a wrong pairing would abort or hang."""
        if not comm.exchanges:
            return
        try:
            records = comm.exchange((event, number, nbytes, detail, self.serial))
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {comm.ranks[comm.rank]} {_DOING[event][0]} {self.name_of(number)} and another rank did not "
                "come: it ended, or waits in another collective, or is later than the group's timeout. "
                f"({type(error).__name__}: {error})"
            ) from error
        if records is not None:
            self._refuse_missing(comm, records)
            told = zip(comm.ranks, records, strict=True)
            self._refuse_divergence({rank: (r[0], r[1], r[2], r[4]) for rank, r in told})

    def _refuse_missing(self, comm: Communicator, records: list[list[int]]) -> None:
        """Raise if some ranks have no values for what the others are about to gather."""
        ranks = [str(rank) for rank, r in zip(comm.ranks, records, strict=True) if r[0] == MISSING]
        if not ranks or any(r[1] != records[0][1] or r[4] != self.serial for r in records):
            return
        unit = self._units[records[0][1]]()
        place = next(r[2] for r in records if r[0] == MISSING)
        name = unit.parameters[place].name if unit is not None and place < len(unit.parameters) else "?"
        raise RuntimeError(
            f"Parameters {name!r} of {self.name_of(records[0][1])} hold no values yet on rank{'s' * (len(ranks) > 1)} "
            f"{', '.join(ranks)}, since they were sharded deferred or on the meta device. Every rank must give its "
            "part values: call shardwright.materialize(model), load a checkpoint, or fill to_local() on each."
        )

    def refuse_reading(self, comm: Communicator, records: list[list[int]]) -> NoReturn:
        """Some ranks read a number of a sharded tensor while the others go on with a model."""
        told = zip(comm.ranks, records, strict=True)
        self._refuse_divergence({rank: (r[0], r[1], r[2], r[4]) for rank, r in told})

    def diverged_gathers(self, comm: Communicator, numbers: list[int]) -> NoReturn:
        """The ranks gathered units of these numbers."""
        self._headers.copy_(self._wanted_headers)
        told = zip(comm.ranks, numbers, strict=True)
        self._refuse_divergence({rank: (GATHER, n, 0, self.serial) for rank, n in told})

    def _refuse_divergence(self, found: dict[int, tuple[int, int, int, int]]) -> NoReturn:
        """Raise, given each rank's event, unit number, bytes and model."""
        first = next(iter(found.values()))
        same_place = len({(event, number, model) for event, number, _, model in found.values()}) == 1
        if same_place and len({nbytes for _, _, nbytes, _ in found.values()}) == 1:
            raise RuntimeError(
                f"The ranks have diverged: they reduce gradients of different parameters of "
                f"{self.name_of(first[1])}. requires_grad must be the same on every rank."
            )
        one_model = len({model for event, _, _, model in found.values() if event != READ}) == 1
        ranks: dict[tuple[int, str], list[int]] = {}
        for rank, (event, number, nbytes, model) in found.items():
            root = next((r for r in _roots if r.serial == model and r.ranks.same(self.ranks)), self)
            what = root.name_of(number) if event != READ else "a sharded tensor (norm, sum, item, float)"
            if not one_model and event != READ:
                what += f" of the group's model {model} ({root._names[0]!r})"
            what += f" of {nbytes} bytes" if same_place else ""
            ranks.setdefault((event, what), []).append(rank)
        told = "; ".join(
            f"rank {r[0]} {_DOING[event][0]} {what}"
            if len(r) == 1
            else f"ranks {', '.join(map(str, r))} {_DOING[event][1]} {what}"
            for (event, what), r in ranks.items()
        )
        unit = self._units[first[1]]() if same_place else None
        if same_place and first[0] == REDUCE:
            told += " (of other parameters: requires_grad must be the same on every rank)"
        elif unit is not None and unit.extended_kinds:
            told += f" (fsdp_pre_all_gather of {unit.extended_kinds} must return equal sizes on every rank)"
        raise RuntimeError(
            f"The ranks have diverged: {told}. Every rank must run the same units, of the same sizes, in the same "
            "order in each step."
        )

    def _compare_headers(self) -> None:
        """On an accelerator: compare on the device, beside the computation; the host looks before the next step."""
        streams = self.streams
        if not streams.asynchronous:
            with streams.beside("gather"):
                flag = (self._headers != self._wanted_headers).any()
                for comm in self.every:
                    order = comm.gather_number(self._reduced)
                    flag = flag | (order != order[0]).any()
                self.flag = flag if self.flag is None else flag | self.flag
            self.flag_mark = streams.mark("gather")
        self._reduced = 0

    def check_divergence(self) -> None:
        """Raise if the gathers since the last look brought another unit's number. Reads one flag of the device.

        Not in a capture: whoever runs the graph puts its flag in place, to be looked at outside.
        """
        if self.streams.capturing:
            return
        flag, self.flag = self.flag, None
        if flag is None:
            return
        self.streams.join(self.flag_mark)
        if flag.item():
            for unit in self.units():
                if unit.parameters:
                    unit.check_headers()
            raise RuntimeError(
                f"The ranks have diverged: in the last backward of {self.name_of(0)} they reduced the gradients of "
                "different units or parameters, or in another order. Every rank must use the outputs of the same units "
                "and have the same requires_grad."
            )


def _refuse_reading(comm: Communicator, records: list[list[int]]) -> None:
    """Raise in the words of a model over these ranks, if there is one."""
    for root in _roots:
        if any(each.ranks == comm.ranks for each in root.every):
            root.refuse_reading(comm, records)


refuse_divergence.append(_refuse_reading)


class _Task:
    """Called when the backward that it was queued in ends. If that raises, the task dies with it, uncalled."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def __call__(self) -> None:
        try:
            with annotate("root_post_backward_callback"), self._root.alone():
                self._root._end_backward()
        except BaseException:
            self._root._task = None  # whoever handles the exception keeps this alive, and may call the model
            raise


@torch.inference_mode(False)
def attach(module: nn.Module) -> Root:
    """Make ``module`` the root of every unit below it. Units that had a smaller root join this one."""
    units: list[Unit] = []
    names: list[str] = []
    for name, child in module.named_modules():
        unit = getattr(child, UNIT, None)
        if unit is None or unit in units:
            continue
        if unit.root is not None and (unit.root.caller is not None or unit.root.backward):
            raise RuntimeError(
                f"Module {name!r} was called on its own and is not finished, so it cannot become part of "
                f"{type(module).__name__} now. Call the outer module first."
            )
        for each in (unit, *unit.companions):
            units.append(each)
            names.append(name or unit.name)
            if each is not unit:
                names[-1] += f" on {each.mesh.mesh_dim_names or each.mesh.mesh.tolist()}"
    if len(units[0].modules) > 1 and len(units) > 1:
        raise RuntimeError(
            f"The first module called belongs to a unit of {len(units[0].modules)} modules, which cannot be the root. "
            "Call fully_shard on the whole model, too, and call that."
        )
    _check_meshes(units, names)
    for unit, name in zip(units[1:], names[1:], strict=True):
        if unit.has_memory_options:
            raise ValueError(
                f"fully_shard of {name!r} was given memory, prefetch or strict, which hold for a whole model: give "
                f"them to the call for {type(module).__name__}"
            )
    for unit in units:
        modules = [m for top in unit.living_modules() for _, m in own_modules(top)]
        cast_buffers(modules, unit.living_ignored(), unit.living_ignored_modules(), unit.policy)
    root = Root(units, names)
    _roots.add(root)
    return root


def _check_meshes(units: list[Unit], names: list[str]) -> None:
    """Every parameter lies on all ranks that have data of their own: nobody else would sum its gradients up."""
    owners = [(unit, name) for unit, name in zip(units, names, strict=True) if unit.parameters]
    if not owners:
        return
    largest, its_name = max(owners, key=lambda owner: owner[0].mesh.size())
    ranks = set(largest.mesh.mesh.flatten().tolist())
    for unit, name in owners:
        if unit.mesh.device_type != largest.mesh.device_type:
            raise ValueError(
                f"Unit {name!r} is on {unit.mesh} and {its_name!r} on {largest.mesh}: give one device"
            )
        for p in unit.parameters if unit.mesh != largest.mesh else ():
            mesh = unit.mesh if p.cut.parallel is None else p.cut.parallel.rest
            if not ranks <= set(mesh.mesh.flatten().tolist()):
                raise ValueError(
                    f"Parameter {p.name!r} of unit {name!r} lies on ranks {mesh.mesh.tolist()}, and unit {its_name!r} "
                    f"is sharded over {largest.mesh.mesh.tolist()}: the other ranks' gradients would not reach it. "
                    "Shard both over the same ranks, or parallelize the module over those that are missing first, as "
                    "for expert parallelism."
                )


@contextmanager
def selecting() -> Iterator[None]:
    """Backward runs only what leads to selected tensors, and changes no gradient of others."""
    roots = [root for root in _roots if not root.selects]
    for root in roots:
        root.selects = True
    try:
        yield
    finally:
        for root in roots:
            root.selects = False


_hooked = False


def hook_optimizers() -> None:
    """Look after this process's models before any torch optimizer steps. Done once."""
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: before_optimizer_step(optimizer))


def before_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """No model's ranks have diverged, a failed backward is left behind, and every gradient is there."""
    for root in list(_roots):
        root.check_divergence()
        root.recover_if_failed()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = set(map(type, parameters))
    _refuse_dead(parameters, kinds)
    first = "_shardwright_stepped" not in optimizer.__dict__
    if first:
        _refuse_deferred_state(optimizer)
        if parameters and all(p.is_meta and p.grad is None for p in parameters):
            raise RuntimeError(
                "Every parameter of the optimizer is on the meta device and has no gradient: it was built before the "
                "model got memory (as by to_empty), so its step would train nothing. Build it from "
                "model.parameters() afterwards."
            )
    stepped = list(_units_of(parameters, kinds))
    if first:
        refuse_state_on_device(optimizer, stepped)
        optimizer.__dict__["_shardwright_stepped"] = True
    for unit in stepped:
        unit.refuse_unsharded("An optimizer's step of")
        unit.drop_kept()  # some kernels write without moving a version counter
        if unit.root is not None:
            unit.root.pools.step()
    reduce_held(parameters)
    if any(unit.chooses_grad_dtype for unit in stepped):
        refuse_gradient_dtypes(optimizer, parameters)
    if not subclasses_dispatch:  # else those that are written move theirs by themselves
        increment_version([p for p in parameters if unit_of(p) is not None and p.grad is not None])


#: What a parameter is while its unit has it, so never one that the model has no more, or that has no values.
_SHARDED = {ShardedParameter, RaggedParameter}


def _refuse_dead(parameters: list[torch.Tensor], kinds: set[type]) -> None:
    """Raise if one of the parameters, which are of these classes, was sharded or materialized as another object.

    In every step, as groups may be changed by anyone; so sharded parameters are not even looked at.
    """
    if kinds <= _SHARDED:
        return
    deferred = {kind for kind in kinds if getattr(kind, DEFERRED, False)}
    if not deferred and not any(TAKEN in p.__dict__ for p in parameters):
        return
    for p in parameters:
        taken = p.__dict__.get(TAKEN)
        if taken is not None and not isinstance(p, Managed):
            if not isinstance(taken.sharded, Managed) or unit_of(taken.sharded) is not None:
                raise RuntimeError(
                    f"The optimizer holds parameter {taken.label!r} as it was before the model was sharded or "
                    "materialized, so its step would train nothing. Call shardwright.fully_shard_optimizer(optimizer) "
                    "after fully_shard, or build the optimizer from model.parameters() afterwards."
                )
        elif type(p) in deferred:
            raise RuntimeError(
                f"The optimizer holds a deferred parameter of shape {tuple(p.shape)}, which has no values yet. Call "
                "shardwright.materialize(model) first."
            )


def _refuse_deferred_state(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if getattr(type(value), DEFERRED, False):
                raise RuntimeError(
                    f"Optimizer state {key!r} is deferred: the optimizer made it from deferred parameters. Call "
                    "shardwright.fully_shard_optimizer(optimizer), or build the optimizer after materialize."
                )


def _units_of(parameters: list[torch.Tensor], kinds: set[type]) -> Iterable[Unit]:
    """The units whose parameters, or the local tensors of them, are among these, which are of these classes."""
    refs = {id(ref): ref for p in parameters if (ref := p.__dict__.get(UNIT_OF)) is not None}  # one for many
    units = {id(u): u for ref in refs.values() if (u := ref()) is not None}
    if not kinds.isdisjoint((torch.Tensor, nn.Parameter)):
        plain = {p.untyped_storage()._cdata for p in parameters if type(p) in (torch.Tensor, nn.Parameter)}
        for unit in (unit for root in list(_roots) for unit in root.units() if id(unit) not in units):
            if any(shard.untyped_storage()._cdata in plain for shard in unit.shards):
                units[id(unit)] = unit
    return units.values()


def reduce_held(parameters: Iterable[torch.Tensor]) -> None:
    """Reduce what micro-batches without communication have left of these parameters, since it is needed now."""
    if not any(unit.holds for root in _roots for unit in root.units()):
        return
    held = {id(u): u for p in parameters if (u := unit_of(p)) is not None and u.holds}
    for unit in held.values():
        unit.reduce(now=True)
        unit.root.finish_held()
