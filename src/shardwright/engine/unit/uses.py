"""The actions on a unit: gather, keep and release its weights, reduce its gradients, step it.

``model/calls.py``, ``model/backward.py`` and ``model/root.py`` decide when.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardwright.engine.base.settings import Transport
from shardwright.engine.comm import BlockCodec, Codec
from shardwright.engine.compat.modes import quick_attributes
from shardwright.engine.gradients.stepping import SteppedGradient, forget_stepped
from shardwright.engine.unit.accumulation import ranks_of_scatters
from shardwright.engine.unit.unit import Unit
from shardwright.engine.weights.coding import refuse_codec


def valid_for(unit: Unit, call: int) -> bool:
    """Whether the slab may be read by the given root call without filling it again."""
    if unit.gradients.overdue:
        complete(unit)
    return unit.weights.valid_for(call)


def issue(unit: Unit, call: int, look: bool = True) -> None:
    """See :meth:`Weights.issue`. First waits for gradients of an earlier backward."""
    if unit.gradients.overdue:
        complete(unit)
    if unit.values.unset:
        _refuse_without_values(unit)
    root = unit.root
    assert root is not None
    unit.weights.issue(call, look, root.backward)


def _refuse_without_values(unit: Unit) -> None:
    """Raise if a parameter has no values, on every rank where ranks agree before a gather.

    A rank without any element of a parameter cannot see whether the others were given values. It goes on.
    """
    unset = unit.without_values()
    comm = unit.weights.copies.training.gather.first
    missing = [
        i
        for i, p in enumerate(unit.weights.parameters)
        if p.sharded in unset and (p.local.numel() or not p.sharded.numel() or not comm.exchanges)
    ]
    if missing:
        assert unit.root is not None
        unit.root.agreement.agree_on_missing(comm, unit.number, missing[0])
        names = ", ".join(repr(p.name) for p in unit.parameters if p.sharded in unset)
        raise RuntimeError(
            f"Parameters {names} of unit {unit.name!r} hold no values yet, since they were "
            "sharded deferred or on the meta device. Call shardwright.materialize(model), or load a checkpoint."
        )


def leave_forward(unit: Unit) -> None:
    """Keep or release the weights, after the last call of a forward has returned."""
    unit.activity.to_run.clear()
    weights = unit.weights
    if _keeps_after_forward(unit):
        weights.show_sharded()
        return
    if (
        weights.copies.secondary is not None
        and unit.settings.reshard_after_forward is not True
        and torch.is_grad_enabled()
    ):
        weights.keep_secondary()
    weights.release()


def _keeps_after_forward(unit: Unit) -> bool:
    weights = unit.weights
    if unit.site.ranks.keeps_full:
        weights.kept = True
        return True
    reshard = unit.settings.reshard_after_forward
    if torch.is_grad_enabled():
        return not (unit.number != 0 if reshard is None else bool(reshard))
    # The user asked to keep them, so they are kept for the next evaluation step, too, until weights change.
    weights.kept = reshard is False
    return weights.kept


def fills(unit: Unit) -> bool:
    """Whether this backward gives unused parameters gradients of zero. A backward to selected tensors does not."""
    return unit.settings.fills_unused and not (unit.root is not None and unit.root.selected is not None)


def reduces_now(unit: Unit) -> bool:
    """Whether a backward reduces its gradients and holds none."""
    return unit.settings.sync and _reduces_all(unit)


def _reduces_all(unit: Unit) -> bool:
    """Whether the running backward leaves no reduction for the last one of its step."""
    root, ranks = unit.root, unit.site.ranks
    assert root is not None
    return (root.is_last_backward and unit.settings.all_reduce) or not (ranks.finishes_late or ranks.waits)


def reduce(unit: Unit, needed: bool = False) -> None:
    """Reduce the gradients, with zeros for missing ones, or hold them while communication is switched off.

    Whether to reduce depends only on which units ran, never on which gradients this rank has: the ranks must
    issue the same reductions in the same order. ``needed``: no backward has reached the unit, but its held gradients
    are needed.
    """
    root, settings, stepping, place = unit.root, unit.settings, unit.stepping, unit.weights.place
    assert root is not None
    assert place is not None
    if stepping is not None:
        if root.selected is not None and unit not in root.selected:
            return  # there are no new gradients, and a reduction would step those of earlier micro-batches
        forget_stepped(unit.weights.forms.shardeds)
        stepping.due = False  # the running reduction is stepped together with this one
    begun = unit.gradients.reduce(place, settings, needed, _reduces_all(unit), fills(unit))
    if not begun:
        return
    root.reductions.add(unit.number)
    if stepping is not None:
        last_backward = settings.sync and settings.all_reduce and root.is_last_backward
        stepping.expect(unit, last_backward, root.clock.begun)


def continue_reduction(unit: Unit) -> bool:
    """Issue the collectives after the reduce-scatter. Returns whether there were any."""
    place = unit.weights.place
    return unit.gradients.go_on(place.label if place is not None else "")


def finish_reduction(unit: Unit) -> None:
    unit.gradients.finish(unit.settings)
    if unit.site.reads is not None and unit.root is not None:
        unit.root.reductions.arrivals.add(unit)
    # While other calls wait for their backward, more gradients may come. Then the end of backward steps the unit.
    if not unit.activity.unfinished:
        step_if_due(unit)


def step_if_due(unit: Unit) -> None:
    """Step the unit if it is due, because no more gradients come in this backward, and no running call reads it."""
    stepping = unit.stepping
    if stepping is not None and stepping.due and not unit.activity.calls and not unit.gradients.arriving:
        stepping.run(unit)


def expect_penalties(unit: Unit) -> None:
    """At the end of backward, let a unit be stepped whose gradients came from penalties alone: nothing was reduced.

    Raises:
        RuntimeError: they came after the unit was stepped (by :meth:`Stepping.run`, which follows).
    """
    root, stepping, settings = unit.root, unit.stepping, unit.settings
    if root is None or stepping is None or stepping.due or unit.gradients.held or unit.gradients.arriving:
        return
    if not (root.is_last_backward and settings.sync and settings.all_reduce) or root.selected is not None:
        return
    with quick_attributes():
        gradients = [p.grad for p in unit.weights.forms.shardeds]
    if any(g is not None and not isinstance(g, SteppedGradient) for g in gradients):
        stepping.expect(unit, True, root.clock.begun)


def land(unit: Unit) -> None:
    """Let the host wait for the gradients, and step the unit if no more can come in this backward."""
    if unit.stepping is not None:
        forget_stepped(unit.weights.forms.shardeds)
    unit.gradients.land()
    if not unit.activity.unfinished:
        step_if_due(unit)


def complete(unit: Unit) -> None:
    """Wait for gradients of an earlier backward that are still on their way to the host, and step them."""
    if unit.gradients.overdue:
        land(unit)
        if unit.stepping is not None and unit.stepping.due:  # its backward has ended, and its next use waits
            unit.stepping.run(unit)


def follow_requires_grad(unit: Unit) -> None:
    """Copy ``requires_grad`` from the sharded parameters, because users may have changed it."""
    if unit.gradients.overdue:
        complete(unit)
    unit.gradients.follow_requires_grad(unit.settings)


def recover(unit: Unit) -> None:
    """Drop the weights and gradients of an interrupted forward or backward."""
    unit.activity.forget()
    if unit.stepping is not None:
        unit.stepping.due = unit.stepping.running = False
    unit.gradients.discard()
    if unit.parameters:
        unit.weights.release()
        unit.weights.drop_secondary()


def check_codec(unit: Unit, codec: Codec | BlockCodec | None) -> None:
    """Raise ValueError if the unit's layout cuts blocks of the codec."""
    weights = unit.weights
    refuse_codec(weights.copies.layout, [p.cut for p in weights.parameters], codec, weights.site.owner)


def gather_by(unit: Unit, **changes: Any) -> None:
    """Replace these of the :class:`Transport`, between steps, and lay out gathers for it."""
    unit.weights.compute_as(False)
    unit.release()
    unit.change(transport=replace(unit.settings.transport, **changes))
    unit.weights.gather_by(unit.settings.transport)
    unit.rejoin()


def reduce_by(unit: Unit, **changes: Any) -> None:
    """Replace these of the :class:`Transport`, between steps, and plan reductions for it.

    Raises:
        RuntimeError: gradients of earlier micro-batches are held.
        ValueError: there would be both a gradient hook and a custom reduce-scatter.
    """
    transport = replace(unit.settings.transport, **changes)
    _refuse_to_reduce_by(unit, transport)
    complete(unit)
    finish_reduction(unit)
    unit.change(transport=transport)
    unit.gradients.plan_again(ranks_of_scatters(unit.site.ranks, transport), unit.settings)


def _refuse_to_reduce_by(unit: Unit, transport: Transport) -> None:
    if unit.gradients.held:
        raise RuntimeError(
            f"Unit {unit.name!r} holds gradients of earlier micro-batches; change how they are reduced between "
            "optimizer steps."
        )
    if transport.hook is not None and transport.scatter is not None:
        raise ValueError(
            f"Unit {unit.name!r} has a gradient hook and a custom reduce-scatter. The hook makes its own "
            "collectives, so the custom reduce-scatter would never run. Use either set_gradient_comm_hook or "
            "set_custom_reduce_scatter, and pass None to the other."
        )
