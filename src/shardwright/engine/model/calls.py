"""Calls of a unit's modules: gathers and shows the weights before forward, and keeps or releases them after it."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import nn

from shardwright.engine import heartbeat
from shardwright.engine.base.visit import Frame, Visit
from shardwright.engine.compat.autograd import in_backward, next_sequence_number
from shardwright.engine.compat.modes import alone
from shardwright.engine.compat.profiling import annotate
from shardwright.engine.compat.storages import address_of
from shardwright.engine.model.backward import BACKWARD
from shardwright.engine.model.root import Root, attach, root_of
from shardwright.engine.tensors.parameter import FullParameter, plain_of
from shardwright.engine.unit.containers import CycleError
from shardwright.engine.unit.marks import (
    hidden_tensors,
    map_arguments,
    map_tensors,
    mark_inputs,
    mark_outputs,
)
from shardwright.engine.unit.owning import refuse_sharded_stand_ins, settle, settle_now
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import follow_requires_grad, issue, leave_forward
from shardwright.engine.weights.lasting import Lasting, lasting_kind
from shardwright.engine.weights.unready import explain

#: Types of results whose code has not run yet.
LAZY = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class Calls:
    """The hooks of a unit's modules.

    Attributes:
        unit: the unit of the modules.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        unit = self.unit
        root: Root = unit.root or join_model(unit, module)  # type: ignore[assignment]
        if heartbeat.current is not None:
            heartbeat.current.at(heartbeat.BACKWARD if in_backward() else heartbeat.FORWARD, unit.name)
        with annotate("pre_forward", unit.weights.label):
            try:
                return _before(unit, root, module, args, kwargs)
            except CycleError as error:
                raise CycleError(f"Unit {unit.name!r}: {error}") from None

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        unit = self.unit
        with annotate("post_forward", unit.weights.label):
            try:
                result = _after(unit, module, output)
            except CycleError as error:
                raise CycleError(f"Unit {unit.name!r}: {error}") from None
        if heartbeat.current is not None and not in_backward():
            _back_to_caller(heartbeat.current, unit)
        return result

    def forward_failed(self, depth: int) -> None:
        """Clean up after an exception in a call that began inside ``depth`` other calls."""
        explain(sys.exc_info()[1], in_backward())
        root = root_of(self.unit)
        if root is not None:
            with alone(root.device):
                _leave_failed(root, depth)
        if heartbeat.current is not None and not in_backward():
            _back_to_caller(heartbeat.current, self.unit)


def _back_to_caller(beat: heartbeat.Heartbeat | heartbeat.Relay, unit: Unit) -> None:
    """Note that a call of a unit is over: the unit around it goes on, if there is one."""
    root = root_of(unit)
    if root is not None and root.visits.frames:
        beat.at(heartbeat.FORWARD, root.visits.frames[-1].unit.name)
    else:
        beat.at(heartbeat.OUTSIDE)


def depth_of(unit: Unit) -> int:
    """The number of running calls of units in the unit's model."""
    root: Root | None = unit.root  # type: ignore[assignment]
    return len(root.visits.frames) if root is not None else 0


def spare_weights(unit: Unit) -> None:
    """The running call of this unit saves none of its weights for backward. If this is true of all calls of a visit,
    backward does not gather the unit."""
    root = root_of(unit)
    frame = root.visits.frames[-1] if root is not None and root.visits.frames else None
    if frame is not None and frame.unit is unit and frame.visit is not None:
        frame.visit.spared += 1


def lend_if_called(unit: Unit) -> None:
    """A parameter of this unit's module is read. If another unit's call runs, lend the weights to it."""
    root = root_of(unit)
    if root is not None and not unit.weights.forms.full_shown and root.visits.frames:
        lend(unit, root.visits.frames[-1])


def lend(unit: Unit, frame: Frame) -> None:
    """Show this unit's weights until the other unit's call returns, and in its backward, because the call reads
    them."""
    if frame.unit is unit or unit in frame.guests or not unit.weights.parameters:
        return
    root = root_of(unit) or join_model(unit, unit.watch.modules()[0])
    lasting = lasting_kind()
    with alone(root.device):
        _lend(unit, root, frame, lasting)


def join_model(unit: Unit, module: nn.Module) -> Root:
    """Return the model of a unit that has none yet. ``module``: a module of the unit, the root if no other is."""
    with alone(unit.comm.device):
        if unit.root is None:
            settle(unit)
            for lender in unit.watch.lenders:  # its model may contain this unit
                root_of(lender) or attach(lender.watch.modules()[0])
        return root_of(unit) or attach(module)


# -- before forward --------------------------------------------------------------------------------------------------


def _before(unit: Unit, root: Root, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    recomputing = in_backward()
    if recomputing:
        root.enter_backward()
    elif root.caller is None:
        with alone(root.device):
            root.begin(unit, module)
        device = root.device
        if device.type != "cpu":
            args, kwargs = map_arguments(lambda t: t.to(device, non_blocking=True), args, kwargs)
    frame = Frame(unit, next_sequence_number())
    root.visits.frames.append(frame)  # removed by _after or _leave_failed
    policy = unit.arguments.policy
    dtype = policy.param_dtype
    if dtype is not None and policy.cast_forward_inputs and not root.full_precision:
        args, kwargs = map_arguments(lambda t: t.to(dtype) if t.is_floating_point() else t, args, kwargs)
    lasting = lasting_kind()
    with alone(root.device):
        if (unit.watch.lenders or not unit.weights.parameters) and not recomputing:
            settle(unit)
        if unit.weights.parameters:
            _use(unit, root, frame, recomputing, lasting)
    lenders = unit.watch.lenders
    if (lenders or unit.weights.parameters) and lasting is None and _is_marked(unit, recomputing):
        args, kwargs = _mark(unit, root, frame, args, kwargs, recomputing)
    for lender in lenders:
        lend(lender, frame)
    return args, kwargs


def _use(unit: Unit, root: Root, frame: Frame, recomputing: bool, lasting: type[Lasting] | None) -> bool:
    """Gather the full weights, or use the prefetched ones, and show them, because a call that reads them begins.

    Returns False if the unit has no parameters any more, because users have replaced them by those of other units.
    ``lasting``: the kind of copies to show instead, if any.
    """
    activity = unit.activity
    if unit.watch.unsharded:
        unit.refuse_unsharded("Forward of")
    if not activity.calls and not activity.to_run and not recomputing:
        if not unit.weights.forms.full_shown:
            settle_now(unit)
            if not unit.weights.parameters:
                return False
        if unit.weights.forms.lends_over:
            refuse_sharded_stand_ins(unit)
        follow_requires_grad(unit)
        if len(unit.watch.references) > 1:
            activity.to_run = {id(m()) for m in unit.watch.references}
    elif recomputing and not activity.calls and not activity.entered:
        follow_requires_grad(unit)
    activity.calls += 1
    weights = unit.weights
    if weights.forms.lasting is not None:
        weights.forms.hide_lasting()
    if not recomputing:
        root.forward_reaches(unit)
    elif not weights.gathered:
        issue(unit, root.clock.call)
    weights.wait()
    weights.forms.show_full()
    if lasting is not None:
        _show_lasting(unit, root, frame, lasting)
    return True


def _show_lasting(unit: Unit, root: Root, frame: Frame, kind: type[Lasting]) -> None:
    """Let the modules compute with copies of the full weights, and listen for the copies' gradients."""
    visit = root.visits.of(
        unit, BACKWARD, recomputing=True
    )  # a separate visit, since other calls have other copies
    visit.calls, visit.endless, visit.lasting = 1, True, True
    host = frame.visit if frame.unit is not unit and frame.visit is not None else root.visits.around(frame)
    if host is not None:
        visit.hosts.append(host)
    lasting = unit.weights.forms.lasting = kind(unit.weights.parameters, visit)
    if unit.stepping is not None and lasting.has_graph:
        unit.activity.expect(visit)


def _is_marked(unit: Unit, recomputing: bool) -> bool:
    """Whether a call needs marks in the graph.

    A recomputation for a visit whose backward runs fills saved tensors of the first graph, which already has marks.
    Reentrant checkpointing instead runs backward through the recomputed graph.
    """
    return torch.is_grad_enabled() and not (recomputing and bool(unit.activity.visits))


def _mark(unit: Unit, root: Root, frame: Frame, args: Any, kwargs: Any, recomputing: bool) -> tuple[Any, Any]:
    """Mark the inputs, so that the call's visit hears of its backward. Outputs are marked when they exist."""
    visit = frame.visit = root.visits.of(unit, BACKWARD, recomputing)
    host = root.visits.around(frame)
    if host is not None and host not in visit.hosts:
        visit.hosts.append(host)
    args, kwargs, marked, frame.entry = mark_inputs(visit, args, kwargs)
    frame.first_own = next_sequence_number()
    visit.calls += 1
    visit.endless |= not marked
    if unit.site.neighbours is not None or unit.stepping is not None:
        unit.activity.expect(visit)
    return args, kwargs


def _lend(unit: Unit, root: Root, frame: Frame, lasting: type[Lasting] | None) -> None:
    recomputing = in_backward()
    if recomputing:
        root.enter_backward()
    elif root is not frame.unit.root and root.caller is None:
        root.clock.turn()  # the caller is of another model, and this is no call of it
        assert frame.unit.root is not None
        root.compute_as(root.full_precision_in_eval and frame.unit.root.full_precision)
    frame.guests.append(unit)
    if not _use(unit, root, frame, recomputing, lasting):
        frame.guests.remove(unit)
        return
    if lasting is None and _is_marked(unit, recomputing):
        if frame.visit is None:
            # A separate visit, since it has no marked input.
            frame.visit = root.visits.of(frame.unit, BACKWARD, recomputing=True)
            frame.visit.calls += 1
            frame.visit.endless = True
        guest = root.visits.of(unit, BACKWARD, recomputing=True)
        guest.calls += 1
        if unit.stepping is not None:
            unit.activity.expect(guest)
        frame.visit.guests.append(guest)


# -- after forward ---------------------------------------------------------------------------------------------------


def _after(unit: Unit, module: nn.Module, output: Any) -> Any:
    root: Root = unit.root  # type: ignore[assignment]
    frame = root.visits.frames[-1]  # removed when nothing can fail any more, else by _leave_failed
    visit, weights = frame.visit, unit.weights
    unit.activity.to_run.discard(id(module))
    if isinstance(output, LAZY):
        raise TypeError(
            f"The forward of unit {unit.name!r} ({type(module).__name__}) returned a {type(output).__name__}, "
            "which runs when the weights are released. Let forward return its results, or shard the modules that "
            "it calls."
        )
    if weights.parameters and weights.forms.lasting is None:
        output = _copy_weights(unit, output)
    stash = unit.watch.stash
    if stash.looks:
        stash.looks -= 1
        _refuse_weights(unit, [*stash.find(), *hidden_tensors(output)], module)
    if visit is not None:
        marked = mark_outputs(visit, output, frame.entry)
        visit.returns |= marked
        if not marked and visit.endless:
            root.visits.hold(visit)
        visit.spans.append((frame.first_own, next_sequence_number()))
        visit.end = root.clock.tick()
        for stay in visit.guests:
            stay.end = visit.end
    recomputing = in_backward()
    with alone(root.device):
        root.visits.frames.pop()
        for guest in frame.guests:
            _leave(guest, root, None, recomputing)
        if weights.parameters:
            _leave(unit, root, visit, recomputing)
        if not recomputing and not root.visits.frames and root.caller is not None:
            root.end()
    dtype = unit.arguments.policy.output_dtype
    if dtype is not None and not root.full_precision:
        output = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)
    return output


def _leave(unit: Unit, root: Root, visit: Visit | None, recomputing: bool) -> None:
    """Leave a call that read the full weights and has returned."""
    activity = unit.activity
    activity.calls -= 1
    if not activity.calls and not activity.to_run and not recomputing:
        root.forward_leaves(unit, visit)
        leave_forward(unit)


def _leave_failed(root: Root, depth: int) -> None:
    frames = root.visits.frames[depth:]
    del root.visits.frames[depth:]
    for unit in [u for frame in reversed(frames) for u in (*frame.guests, frame.unit)]:
        activity = unit.activity
        if unit.weights.parameters and activity.calls:
            activity.calls -= 1
            if not activity.calls and not in_backward():
                activity.to_run.clear()
                unit.release()
    if not root.visits.frames and root.caller is not None and not in_backward():
        root.abandon()


def _copy_weights(unit: Unit, output: Any) -> Any:
    """Clone outputs that are views of the unit's weights: their memory may be released soon, or edited."""
    weights = unit.weights

    def check(tensor: torch.Tensor) -> torch.Tensor:
        plain = plain_of(tensor)
        if type(plain) in (torch.Tensor, FullParameter) and weights.has(plain):
            return tensor.clone()
        return tensor

    return map_tensors(check, output)


def _refuse_weights(unit: Unit, tensors: list[torch.Tensor], module: nn.Module) -> None:
    """Raise if a view of the unit's weights is stored where a copy cannot replace it."""
    slab = unit.weights.copy.slab
    start, end = slab.address, slab.address + slab.nbytes
    for tensor in tensors:
        plain = plain_of(tensor)
        if type(plain) is torch.Tensor and start <= address_of(plain) < end:
            raise RuntimeError(
                f"Unit {unit.name!r} ({type(module).__name__}) keeps a view of its weights, of shape "
                f"{tuple(tensor.shape)}, in an attribute or an object, but their memory is released after forward. "
                "Keep a clone, or return the view."
            )
