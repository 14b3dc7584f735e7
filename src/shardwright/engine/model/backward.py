"""A unit's part in backward: from the first output that it reaches to the last input that it leaves."""

from __future__ import annotations

import weakref

import torch

from shardwright.engine import heartbeat
from shardwright.engine.base.visit import Visit
from shardwright.engine.compat.modes import alone
from shardwright.engine.compat.profiling import annotate
from shardwright.engine.model.root import Root
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import follow_requires_grad, issue, reduce


class Backward:
    """The hooks for every visit. It has no state; the unit's ``activity`` and the model's root have it."""

    def enter(self, visit: Visit) -> None:
        """Backward has reached an output of a visit: gather the weights that it will read."""
        unit: Unit = visit.unit
        if visit not in unit.activity.visits:
            root: Root = unit.root  # type: ignore[assignment]
            if heartbeat.current is not None:
                heartbeat.current.at(heartbeat.BACKWARD, unit.name)
            with annotate("pre_backward", unit.weights.label), alone(root.device):
                _enter(unit, visit)

    def after_call(self, visit: Visit) -> None:
        """Backward has produced the gradients of one call's inputs."""
        visit.remaining -= 1
        if visit.remaining == 0 and not visit.endless:
            with alone(visit.unit.root.device):
                self.close(visit)

    def close(self, visit: Visit) -> None:
        """Close a visit. If no other visit of the unit is open, release the weights and reduce the gradients."""
        unit: Unit = visit.unit
        activity, weights = unit.activity, unit.weights
        root: Root = unit.root  # type: ignore[assignment]
        if visit not in activity.visits:
            return
        activity.visits.discard(visit)
        if activity.unfinished:
            activity.unfinished.discard(weakref.ref(visit))
        root.visits.leave(visit)
        if not activity.visits and weights.parameters:
            if not activity.calls:  # else this backward ran inside the unit's own forward
                weights.kept = unit.site.ranks.keeps_full or not unit.settings.reshard_after_backward
                if weights.kept:
                    weights.show_sharded()
                else:
                    weights.release()
            if not activity.unfinished and weights.copies.secondary is not None:
                weights.drop_secondary()
            reduce(unit)
        for guest in visit.guests:
            guest.close()


BACKWARD = Backward()


def _enter(unit: Unit, visit: Visit) -> None:
    root: Root = unit.root  # type: ignore[assignment]
    if unit.watch.unsharded:
        unit.refuse_unsharded("Backward through")
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"Backward with create_graph=True reached unit {unit.name!r}: sharded parameters do not support double "
            "backward, because their memory is released after each use. A gradient of a gradient, as of a gradient "
            "penalty, is possible with torch.func.grad, which gets copies of the weights."
        )
    if visit.generation != unit.weights.generation:
        raise RuntimeError(
            f"Parameters of unit {unit.name!r} were replaced by parameters of another shape or dtype after the "
            "forward of this backward. Run the forward again."
        )
    root.enter_backward()
    visit.remaining = visit.calls
    unit.activity.visits.add(visit)
    root.visits.enter(visit)
    for host in visit.hosts:  # units may run inside one another
        host.before_backward()
    root.visits.close_later(visit)
    if unit.weights.parameters:
        if not unit.activity.entered:
            unit.activity.entered = True
            follow_requires_grad(unit)
        if not visit.lasting and not visit.reads_none:
            _show(unit, visit)
    for guest in visit.guests:
        guest.before_backward()


def _show(unit: Unit, visit: Visit) -> None:
    root: Root = unit.root  # type: ignore[assignment]
    weights = unit.weights
    weights.notice_edits()
    if unit.settings.unshard_in_backward and not (weights.gathered and weights.is_current):
        issue(unit, root.clock.call, look=False)
    root.backward_reaches(visit)
    weights.wait()
    weights.forms.show_full()
