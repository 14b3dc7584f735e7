"""The root: the shared state of a model's units, and the begin and end of each forward and backward.

Any unit may be called first. The outermost call is the root call. The order of one root call is the guess for the next.
A guess only moves a gather earlier: every unit still checks that its slab is of this call.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwright.engine import heartbeat
from shardwright.engine.assembly.find import UNIT, own_modules
from shardwright.engine.base.clock import Clock
from shardwright.engine.base.home import Place
from shardwright.engine.base.precision import cast_buffers
from shardwright.engine.base.settings import ModelOptions
from shardwright.engine.base.visit import Visit
from shardwright.engine.compat.autograd import queue_callback
from shardwright.engine.compat.modes import alone
from shardwright.engine.compat.profiling import annotate
from shardwright.engine.model.agreement import Agreement
from shardwright.engine.model.divergence import END_BACKWARD, END_FORWARD
from shardwright.engine.model.full_precision import check_agree, uses_full_precision
from shardwright.engine.model.order import Order
from shardwright.engine.model.pools import Pools, prefetch_budget
from shardwright.engine.model.prefetch import Prefetch
from shardwright.engine.model.reductions import Reductions
from shardwright.engine.model.runs import Run, Runs
from shardwright.engine.model.unfinished import BegunStep
from shardwright.engine.model.visits import Visits
from shardwright.engine.tensors.direct import watch
from shardwright.engine.unit.owning import at_rest, settle_now
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import (
    expect_penalties,
    fills,
    follow_requires_grad,
    issue,
    leave_forward,
    recover,
    reduce,
    reduces_now,
    step_if_due,
    valid_for,
)

roots: weakref.WeakSet[Root] = weakref.WeakSet()


class Root:
    """The root of a model. Units refer to it; its references to units are weak.

    Attributes:
        gathered: numbers of the units whose slabs are leased.
        clock: the clock of the model.
        visits: running calls, and their visits in the graph.
        runs: uses of weights without a call of their unit, in the running root call.
        reductions: the running reductions.
        caller: the unit of the outermost call; None: no forward runs.
        backward: whether a backward has reached the model and has not ended.
        is_last_backward: whether it is the last backward of a step.
        selected: if the user has selected the tensors that get gradients, the units with parameters among them.
            Else None.
        full_precision_in_eval: whether root calls in eval mode compute with weights in their storage dtypes.
        full_precision: whether the running or last root call does so.
        begun_step: the running step of an optimizer with parameters of this model.
        task: returns the callback at the end of the backward; None if there is none, or if the backward has failed.
    """

    def __init__(self, units: list[Unit], names: list[str]) -> None:
        self._units = [weakref.ref(u) for u in units]
        self.device = units[0].ranks.device
        self.gathered: set[int] = set()
        self.full_precision_in_eval = check_agree(units, names)
        self.full_precision = False
        self.caller: Unit | None = None
        self.backward = False
        self.is_last_backward = True
        self.selected: Collection[Unit] | None = None
        self.begun_step: BegunStep | None = None
        self.task: Callable[[], _Task | None] = _no_task
        options = units[0].options
        depth, nbytes = prefetch_budget(options.prefetch)
        self.pools = Pools(options.memory, depth, options.strict)
        # A plan needs the leases of the first step, whose order is not known yet.
        first = [n for n, unit in enumerate(units) if unit.parameters] if self.pools.planned else []
        self.clock = Clock()
        self._order = Order(first)
        self._prefetch = Prefetch(self._units, self._order, depth, nbytes)
        self.visits = Visits(self.clock, self._order)
        self.runs = Runs()
        self.reductions = Reductions(self._units)
        self.agreement = Agreement(units, names)
        try:
            for number, (unit, name) in enumerate(zip(units, names, strict=True)):
                headers = self.agreement.headers_of(number)
                unit.join(Place(self, number, name, name if number else "", *headers))
            self.pools.join(units)
            roots.add(self)
            self.agreement.begin()  # last, so that a rank that fails here counts models like the others
        except BaseException:  # so that the next call makes the root again
            self.agreement.model.abandon()
            roots.discard(self)
            for unit in units:
                unit.root = None
            raise

    @property
    def top(self) -> Unit | None:
        """The unit of the outermost module."""
        return self._units[0]()

    def units(self) -> list[Unit]:
        return [u for ref in self._units if (u := ref()) is not None and u.root is self]

    def _gathered_units(self) -> list[Unit]:
        return [
            u for number in sorted(self.gathered, reverse=True) if (u := self._units[number]()) is not None
        ]

    def compute_as(self, full_precision: bool) -> None:
        """From now on gather weights in their storage dtypes, or in their compute dtypes. No call may run."""
        if self.full_precision != full_precision:
            try:
                for unit in self.units():
                    unit.weights.compute_as(full_precision)
            except BaseException:
                for unit in self.units():
                    unit.weights.compute_as(self.full_precision)
                raise
            self.full_precision = full_precision

    def _enter(self, event: int) -> None:
        """Begin a forward or backward, which ``event`` ends. After a failure the ranks drop their guesses, which may
        differ."""
        if self.agreement.enter(event):
            self._order.forget()

    # -- forward -------------------------------------------------------------------------------------------------

    def begin(self, unit: Unit, module: nn.Module) -> None:
        """Begin the outermost call of this model, of a ``module`` of ``unit``."""
        with annotate("root_pre_forward"):
            if self.begun_step is not None:
                self.notice_interrupted_step()
            self.agreement.check()
            self.recover_if_failed()
            if self.full_precision_in_eval:
                self.compute_as(uses_full_precision(module))
            self._enter(END_FORWARD)
            self.agreement.streams.rejoin()
            self.clock.begin_call()
            self.caller = unit
            self.visits.frames.clear()
            self._order.begin(unit.number)
            self.runs.begin(unit.number)
            watch.begin()
            for each in self.units():
                each.gradients.release_unused()
            self.pools.begin()

    def forward_reaches(self, unit: Unit) -> None:
        """Gather a unit that is about to compute, unless its gather runs, and gather the next unit beside it."""
        self.runs.call(unit.number)
        self._gather_with_next(unit)

    def _gather_with_next(self, unit: Unit) -> None:
        call = self.clock.call
        if not valid_for(unit, call):
            issue(unit, call)
        for other in self._prefetch.after(unit):
            if other.root is self and other.weights.parameters and not valid_for(other, call):
                if at_rest(other):
                    settle_now(other)  # else it would gather again after its module has begun
                if other.weights.parameters:
                    issue(other, call)

    def forward_leaves(self, unit: Unit, visit: Visit | None) -> None:
        """Add a unit to the order of backward, after its last call. A unit without outputs, or whose backward reads no
        weights, is not prefetched in backward."""
        if visit is not None and visit.returns and not visit.reads_none:
            visit.place = len(visit.order)
            visit.order.append(unit.number)

    def reach_run(self, unit: Unit) -> Run:
        """Gather a unit whose weights an operation reads without a call of the unit, outside of any call, too."""
        begins = unit.number not in self.runs.running
        run, over = self.runs.use(unit)
        for other in over:
            self.end_run(other)
        if begins and self.caller is not None:
            self._gather_with_next(unit)
        else:
            unit.weights.notice_edits()
            if not (unit.weights.gathered and unit.weights.is_current):
                issue(unit, self.clock.call)
        return run

    def end_run(self, run: Run) -> None:
        """Keep or release the weights after the last use of a run."""
        unit = run.unit
        self.runs.running.pop(unit.number, None)
        self.forward_leaves(unit, run.visit)
        if not unit.activity.busy:
            leave_forward(unit)

    def end(self) -> None:
        """End the outermost call. Drops prefetched weights that were not used."""
        caller, self.caller = self.caller, None
        assert caller is not None
        for run in self.runs.end():
            self.end_run(run)
        self.visits.end_call()
        used = set(self._order.seen)
        for unit in self._gathered_units():
            if unit.activity.to_run:
                leave_forward(unit)
            elif unit.number not in used and not unit.weights.kept:
                unit.release()
        self._agree_at_end(END_FORWARD, caller.number)
        self._order.end(caller.number)

    def abandon(self) -> None:
        """Clean up after the outermost call has failed. Its order is no guess for the next call."""
        error = sys.exc_info()[1]
        if error is not None:
            self.agreement.leave(END_FORWARD, error)
        self.caller = None
        self.visits.frames.clear()
        self.visits.end_call()
        self.runs.forget()
        for unit in self.units():
            unit.activity.forget_calls()
            unit.weights.drop_secondary()
        for unit in self._gathered_units():
            unit.release()

    # -- backward ------------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward that has reached this model runs, and has not failed."""
        return self.backward and self.task() is not None

    def enter_backward(self) -> None:
        """Backward has reached this model. At the first time, register a callback for its end."""
        if self.backward:
            if self.task() is not None:
                return
            self.recover()  # the last backward raised before its end
        task = _Task(self)
        queue_callback(task)
        self.task = weakref.ref(task)
        self.backward = True
        if not watch.used:
            watch.end()
        self.agreement.streams.note_current()
        if self.caller is None:
            self._enter(END_BACKWARD)
            self.compute_as(False)
        self.clock.turn()

    def backward_reaches(self, visit: Visit) -> None:
        """Gather the unit whose backward comes next, beside this unit's backward."""
        for other in self._prefetch.before(visit):
            if (
                other.root is self
                and other.weights.parameters
                and not other.weights.gathered
                and other.settings.unshard_in_backward
            ):
                issue(other, self.clock.call, look=False)  # its backward checks for edits

    def finish_held(self) -> None:
        """Wait for reductions of held gradients that began outside of a backward."""
        self.reductions.finish()
        self.reductions.arrivals.end_backward()

    def end_backward(self) -> None:
        """End a backward: reduce the remaining gradients, in the same order on all ranks, and release all weights."""
        self.visits.close_all()
        for unit in reversed(self.units()):
            if unit.weights.parameters:
                _finish_backward(unit)
        self.finish_held()
        stepped = _end_steps(self.units())
        for unit in self._gathered_units():
            if not unit.weights.kept and not unit.activity.calls:  # backward may have run inside a forward
                unit.release()
        self.agreement.streams.rejoin()
        self.backward = False
        self.clock.turn()
        self.pools.trained = True
        if stepped:
            self.pools.step()
        self.agreement.steps.end_backward(stepped)
        self._agree_at_end(END_BACKWARD, 0)
        self.agreement.compare()

    def end_unreached_backward(self) -> None:
        """End a backward that has not reached this model on this rank, but perhaps on others."""
        self._enter(END_BACKWARD)
        self._agree_at_end(END_BACKWARD, 0)
        self.agreement.compare()

    def _agree_at_end(self, event: int, number: int) -> None:
        """Agree with all ranks at the end of a forward or backward.

        If another rank has failed, it has released its weights. So this rank releases its own, kept ones too. Otherwise
        the others would gather in the next forward, and this rank would not.
        """
        try:
            self.agreement.agree_all(event, number)
        except BaseException:
            for unit in self._gathered_units():
                if not unit.activity.busy:
                    unit.release()
            raise

    def count_step(self) -> None:
        """Count a step of an optimizer on parameters of this model."""
        self.agreement.steps.add(self.in_backward)
        self.begun_step = None  # last: if an exception comes before, ranks may not have counted alike

    def stepped_units(self) -> list[Unit]:
        """The units whose optimizer has stepped them in backward since the last call of the model began."""
        calls = self.clock.begun
        return [u for u in self.units() if u.stepping is not None and u.stepping.has_stepped(calls)]

    def notice_interrupted_step(self, beginning: torch.optim.Optimizer | None = None) -> None:
        """Note that an exception has ended an optimizer's step, if it has changed anything before. ``beginning``: the
        optimizer whose step begins now."""
        step = self.begun_step
        if step is None or step.is_running(beginning):
            return
        if step.has_changed_something():
            self.agreement.steps.interrupt()
        self.begun_step = None

    # -- failures ------------------------------------------------------------------------------------------------

    def recover_if_failed(self) -> None:
        """If the last backward raised before its end, clean up after it."""
        if self.backward and not self.in_backward:
            self.recover()

    def recover(self) -> None:
        """Drop the slabs and gradients of a forward or backward that an exception has ended."""
        self.reductions.arrivals.recover()
        self.caller = None
        self.backward = False
        self.visits.forget()
        self.runs.forget()
        self.reductions.forget()
        self.agreement.forget_backward()
        units = self.units()
        # Ranks that have stepped other units before the failure are of different ages then.
        self.agreement.steps.end_backward(len(self.stepped_units()))
        if any(unit.stepping is not None and unit.stepping.running for unit in units):
            self.agreement.steps.interrupt()
        for unit in units:
            recover(unit)
        self.agreement.streams.rejoin()


def _end_steps(units: list[Unit]) -> bool:
    """Step the remaining units in backward. Returns whether any unit was stepped, now or before."""
    units = [unit for unit in reversed(units) if unit.stepping is not None]
    for unit in units:
        expect_penalties(unit)
        step_if_due(unit)
    steppers = {id(s): s for unit in units if unit.stepping is not None for s in unit.stepping.steppers}
    return any([stepper.backward_ended() for stepper in steppers.values()])


def _finish_backward(unit: Unit) -> None:
    """Leave a unit's backward if this is not done yet. Reduce late and held gradients."""
    activity, gradients = unit.activity, unit.gradients
    if not activity.entered:  # other ranks' backward may have entered it, which follows requires_grad, too
        follow_requires_grad(unit)
    if activity.visits:
        for visit in list(activity.visits):
            visit.close()
    elif gradients.has_gradients():
        reduce(unit)
    elif gradients.held:
        if reduces_now(unit):
            reduce(unit, needed=True)
    elif (
        unit.settings.fills_unused
        and not activity.entered
        and unit.weights.forms.ever_shown
        and fills(unit)
        and reduces_now(unit)
    ):
        reduce(unit)
    activity.entered = False


def root_of(unit: Unit) -> Root | None:
    """The model of a unit, after the first call."""
    return unit.root  # type: ignore[return-value]


class _Task:
    """The callback at the end of a backward. If the backward raises, the callback is dropped without a call."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def __call__(self) -> None:
        try:
            with annotate("root_post_backward_callback"), alone(self._root.device):
                self._root.end_backward()
            heartbeat.at(heartbeat.OUTSIDE)
        except BaseException:
            # The exception keeps this object alive, and code that handles the error may call the model.
            self._root.task = _no_task
            raise


def _no_task() -> None:
    return None


@torch.inference_mode(False)
def attach(module: nn.Module) -> Root:
    """Make ``module`` the root of every unit below it. Units that had a smaller root join this one."""
    units: list[Unit] = []
    names: list[str] = []
    for name, child in module.named_modules():
        unit = getattr(child, UNIT, None)
        if unit is None or unit in units:
            continue
        if (root := root_of(unit)) is not None and (root.caller is not None or root.backward):
            raise RuntimeError(
                f"Module {name!r} was called by itself and its step is not finished, so it cannot become part of "
                f"{type(module).__name__} now. Call the outer module first."
            )
        for each in (unit, *unit.siblings):
            units.append(each)
            names.append(name or unit.name)
            if each is not unit:
                names[-1] += f" on {each.mesh.mesh_dim_names or each.mesh.mesh.tolist()}"
    if len(units[0].watch.references) > 1 and len(units) > 1:
        raise RuntimeError(
            f"The first module that was called belongs to a unit of {len(units[0].watch.references)} modules, which "
            "cannot be the root. Call fully_shard on the whole model, too, and call the whole model."
        )
    _check_meshes(units, names)
    for unit, name in zip(units[1:], names[1:], strict=True):
        if unit.options != ModelOptions():
            raise ValueError(
                f"fully_shard of {name!r} got memory, prefetch or strict, which apply to a whole model: pass them to "
                f"the call for {type(module).__name__}"
            )
    for unit in units:
        modules = [m for top in unit.watch.modules() for _, m in own_modules(top)]
        cast_buffers(modules, unit.watch.ignored(), unit.watch.ignored_modules(), unit.arguments.policy)
    return Root(units, names)


def _check_meshes(units: list[Unit], names: list[str]) -> None:
    """Check that every parameter is on all ranks with different data. Otherwise some gradients would be lost."""
    owners = [(unit, name) for unit, name in zip(units, names, strict=True) if unit.parameters]
    if not owners:
        return
    largest, its_name = max(owners, key=lambda owner: owner[0].mesh.size())
    ranks = set(largest.mesh.mesh.flatten().tolist())
    for unit, name in owners:
        if unit.mesh.device_type != largest.mesh.device_type:
            raise ValueError(
                f"Unit {name!r} is on {unit.mesh} and unit {its_name!r} is on {largest.mesh}: put both on one device"
            )
        for p in unit.parameters if unit.mesh != largest.mesh else ():
            mesh = unit.mesh if p.cut.parallel is None else p.cut.parallel.rest
            if not ranks <= set(mesh.mesh.flatten().tolist()):
                raise ValueError(
                    f"Parameter {p.name!r} of unit {name!r} is on ranks {mesh.mesh.tolist()}, but unit {its_name!r} "
                    f"is sharded over {largest.mesh.mesh.tolist()}: gradients of the other ranks would not reach the "
                    "parameter. Shard both over the same ranks, or first parallelize the module over the missing "
                    "ranks, as for expert parallelism."
                )


@contextmanager
def running_backward() -> Iterator[None]:
    """The context of an outermost backward. If it raises, its models report that to the other ranks."""
    thread = threading.get_ident()
    _backwards.add(thread)
    try:
        yield
    except BaseException as error:
        _backward_failed(error)
        raise
    finally:
        _backwards.discard(thread)


_backwards: set[int] = set()  #: threads that run an outermost backward


def _backward_failed(error: BaseException) -> None:
    heartbeat.at(heartbeat.OUTSIDE)
    # A device's thread of autograd may hold the callback for a moment longer. The next forward must not wait for that:
    # ranks that still took the model for one in backward would gather other units than the rest.
    only_one = len(_backwards) == 1
    for root in list(roots):
        if root.backward and only_one:
            root.task = _no_task
        if root.backward and not root.in_backward and root.caller is None:
            root.agreement.leave(END_BACKWARD, error)


@contextmanager
def selecting(units: Collection[Unit] | None) -> Iterator[None]:
    """A context in which backward computes only gradients of selected tensors, with parameters of these units.

    None: the gradients of all tensors.
    """
    before = [(root, root.selected) for root in roots]
    for root, _ in before:
        root.selected = units
    try:
        yield
    finally:
        for root, selected in before:
            root.selected = selected
