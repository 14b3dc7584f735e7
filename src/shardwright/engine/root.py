"""The root: what the units of one model share. Order, prefetch, and the beginnings and ends of forward and backward.

Any unit may be called first; the outermost call is the root call. The order seen in one root call is the guess for
the next. A guess moves a gather earlier and nothing else: every unit still checks that its slab is of this call.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwright._torch import (
    alone,
    annotate,
    in_backward,
    increment_version,
    queue_callback,
    storage_key,
    subclasses_dispatch,
)
from shardwright.engine.agreement import END_BACKWARD, END_FORWARD, Agreement
from shardwright.engine.companion import companion_of
from shardwright.engine.construct import UNIT, own_modules
from shardwright.engine.full_precision import check_agree, wanted
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
from shardwright.engine.settings import ModelOptions
from shardwright.engine.unit import Unit
from shardwright.engine.visit import Frame, Visit
from shardwright.engine.weights import Weights

_roots: weakref.WeakSet[Root] = weakref.WeakSet()


class Root:
    """Shared state of the units below one module. Units refer to it; it refers to them weakly."""

    def __init__(self, units: list[Unit], names: list[str]) -> None:
        self._units = [weakref.ref(u) for u in units]
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
        self._failures = 0  # in the groups of the model, when a forward or backward began last
        self._orders: dict[int, list[int]] = {}  # by caller: units in the order of its last root call
        self._expected: list[int] = []  # that of the caller of the root call under way
        self._place = 0
        self._seen: list[int] = []
        self._left: list[int] = []
        self._visits: dict[int, Visit] = {}
        self._clock = 0
        self.ranks = units[0].ranks
        self.device = self.ranks.device
        self.streams = self.ranks.comm.streams
        top = units[0]
        self.prefetch, self.prefetch_bytes = prefetch_budget(top.options.prefetch)
        self.pools = Pools(top.options.memory, self.prefetch, top.options.strict)
        #: The order of a caller that was not called yet, for plans to be made of its first step.
        self._guess = [n for n, unit in enumerate(units) if unit.parameters] if self.pools.planned else []
        self._stepped_within = 0  #: steps of optimizers in the backward under way
        self.agreement = Agreement(units, names)
        try:
            for number, unit in enumerate(units):
                unit.join_root(self, number, names[number], *self.agreement.headers_of(number))
            self.pools.join(units)
        except BaseException:  # so that the next call makes a root again
            for unit in units:
                unit.root = None
            raise
        self.agreement.begin()  # last, so that a rank on which this failed counts as the others do

    @property
    def top(self) -> Unit | None:
        """The unit that the module above all others belongs to."""
        return self._units[0]()

    def units(self) -> list[Unit]:
        return [u for ref in self._units if (u := ref()) is not None and u.root is self]

    def name_of(self, number: int) -> str:
        return self.agreement.name_of(number)

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
        self.agreement.check()
        self.recover_if_failed()
        if self.full_precision_in_eval:
            self.compute_as(wanted(module))
        self.enter()
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
        self.agreement.agree_all(END_FORWARD, caller.number)
        self._orders[caller.number] = self._seen

    def abandon(self) -> None:
        """The outermost call has failed: nothing of it is kept, and its order is no guess for the next."""
        error = sys.exc_info()[1]
        if error is not None:
            self.agreement.leave(END_FORWARD, error)
        self.caller = None
        self.frames.clear()
        self._visits = {}
        for unit in self.units():
            unit.forget_calls()
            unit.drop_secondary()
        for unit in self._gathered_units():
            unit.release()

    def enter(self) -> None:
        """A forward or backward begins. After a failure the ranks guess no order: each may know of other calls."""
        failures = self.agreement.enter()
        if failures != self._failures:
            self._orders.clear()
            self._failures = failures

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
        self.agreement.forget_backward()
        self._count_steps_within()
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
                self.enter()
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
            if (
                other.parameters
                and other.root is self
                and not other.gathered
                and other.settings.unshard_in_backward
            ):
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
        self._count_steps_within(stepped)
        self.agreement.agree_all(END_BACKWARD, 0)
        self.agreement.compare()

    def _end_steps(self) -> bool:
        """Step in backward what is left to step. Returns whether any unit was, now or before."""
        units = [unit for unit in reversed(self.units()) if unit.stepping is not None]
        for unit in units:
            unit.step_if_due()
        steppers = {id(s): s for unit in units if unit.stepping is not None for s in unit.stepping.steppers}
        return any([stepper.backward_ended() for stepper in steppers.values()])

    # -- steps of optimizers -------------------------------------------------------------------------------------

    def count_step(self) -> None:
        """An optimizer has stepped parameters of this model.

        What is stepped within a backward (by hooks of parameters) counts when that is over: gradients arrive at the
        host of an offloaded unit at other times on other ranks.
        """
        if self.in_backward:
            self._stepped_within += 1
        else:
            self.agreement.set_age(self.agreement.age + 1)

    def _count_steps_within(self, stepped: bool = False) -> None:
        """Backward is over; ``stepped``: ``sw.optim.in_backward`` has stepped units in it."""
        within, self._stepped_within = self._stepped_within + stepped, 0
        self.agreement.set_age(self.agreement.age + within)


class _Task:
    """Called when the backward that it was queued in ends. If that raises, the task dies with it, uncalled."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def __call__(self) -> None:
        try:
            with annotate("root_post_backward_callback"), alone(self._root.device):
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
        if unit.options != ModelOptions():
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


def backward_failed(error: BaseException) -> None:
    """An exception has left a backward: the ranks that go on with it hear of that."""
    for root in list(_roots) if not in_backward() else ():
        if root.backward and not root.in_backward and root.caller is None:
            root.agreement.leave(END_BACKWARD, error)


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


@functools.cache
def hook_optimizers() -> None:
    """Look after this process's models before and after any torch optimizer steps. Done once."""
    stepping: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Root]] = weakref.WeakKeyDictionary()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not getattr(type(optimizer), COUNTS_STEPS, False):
            stepping[optimizer] = before_optimizer_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        count_step(stepping.pop(optimizer, ()))

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


#: The attribute of a class of optimizers whose step calls :func:`before_optimizer_step` and :func:`count_step` itself.
COUNTS_STEPS = "_shardwright_counts_steps"


def count_step(roots: Iterable[Root]) -> None:
    """An optimizer has made a step with parameters of these models."""
    for root in roots:
        root.count_step()


def before_optimizer_step(optimizer: torch.optim.Optimizer) -> list[Root]:
    """No model's ranks have diverged, a failed backward is left behind, and every gradient is there.

    Returns the models of which the step counts: not where ``sw.optim.in_backward`` has stepped (what it has left to
    step differs by rank), and not of a step that changes nothing, as torch makes it to give an optimizer a state.
    """
    for root in list(_roots):
        root.agreement.check()
        root.recover_if_failed()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = set(map(type, parameters))
    _refuse_dead(parameters, kinds)
    companion = companion_of(optimizer)
    first = not companion.stepped
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
        companion.stepped = True
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
    if all(type(lr := group.get("lr")) in (int, float) and lr == 0 for group in optimizer.param_groups):
        return []
    return list({id(u.root): u.root for u in stepped if u.root is not None and u.stepping is None}.values())


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
        plain = {storage_key(p) for p in parameters if type(p) in (torch.Tensor, nn.Parameter)}
        for unit in (unit for root in list(_roots) for unit in root.units() if id(unit) not in units):
            if any(storage_key(shard) in plain for shard in unit.shards):
                units[id(unit)] = unit
    return units.values()


def reduce_held(parameters: Iterable[torch.Tensor]) -> None:
    """Reduce what micro-batches without communication have left of these parameters, since it is needed now."""
    if not any(unit.held for root in _roots for unit in root.units()):
        return
    held = {id(u): u for p in parameters if (u := unit_of(p)) is not None and u.held}
    for unit in held.values():
        unit.reduce(needed=True)
        unit.root.finish_held()
