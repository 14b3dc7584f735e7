"""Operations that read weights without a call of their unit: gathers the unit for them, and again in their backward.

``tensors/direct.py`` sees such an operation. Modules go on to show sharded parameters, so that each use is seen. The
results of the operations have marks in the graph, as the outputs of a unit's call have.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from shardwright.engine.compat.autograd import in_backward, next_sequence_number
from shardwright.engine.compat.modes import alone, quick_attributes
from shardwright.engine.model.backward import BACKWARD
from shardwright.engine.model.calls import join_model
from shardwright.engine.model.root import Root, root_of, roots
from shardwright.engine.model.runs import Run
from shardwright.engine.tensors.direct import asks_for_form, parameters_in, watch, whole
from shardwright.engine.tensors.numbers.averaging import average, recipe_of
from shardwright.engine.tensors.numbers.hooks import WholeGradient, register
from shardwright.engine.tensors.parameter import plain_of, unit_of
from shardwright.engine.unit.marks import map_tensors, mark_outputs
from shardwright.engine.unit.owning import at_rest, settle_now
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import follow_requires_grad, issue
from shardwright.engine.weights.lasting import lasting_kind


def compute(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a function of torch, computed with whole weights in the place of sharded parameters."""
    watch.used = True
    with quick_attributes():
        units = {unit: None for p in parameters_in(args, kwargs) if (unit := unit_of(p)) is not None}
    for unit in units:  # first, because a model that is joined releases what its parts have gathered
        if root_of(unit) is None:
            join_model(unit, unit.watch.modules()[0])
    operation = _Operation(reads=not asks_for_form(function, args))
    args, kwargs = whole(args, kwargs, operation.full_of)
    entry = next_sequence_number()
    try:
        result = function(*args, **kwargs)
    except BaseException:
        operation.end(None, entry)
        raise
    return operation.end(result, entry)


def runs(unit: Unit) -> bool:
    """Return whether a call of a unit's model runs, or a backward."""
    root = root_of(unit)
    return root is not None and (root.caller is not None or bool(root.visits.frames) or in_backward())


def shows(unit: Unit) -> bool:
    """Return whether a call of a unit's model runs, or is computed again in a backward."""
    root = root_of(unit)
    return root is not None and (root.caller is not None or (in_backward() and torch.is_grad_enabled()))


def any_call_runs() -> bool:
    """Return whether a call of any model runs."""
    return any(root.caller is not None for root in roots)


def see_uses() -> None:
    """Let operations on sharded parameters get whole weights where they need them."""
    watch.compute, watch.runs, watch.shows = compute, runs, shows
    watch.any_call_runs = any_call_runs
    watch.begin()


class _Operation:
    """One operation with whole weights."""

    def __init__(self, reads: bool) -> None:
        self._reads = reads
        self._runs: dict[Unit, Run | None] = {}

    def full_of(self, sharded: Any) -> torch.Tensor:
        """Return the whole weight of a sharded parameter, whose unit is gathered for this operation."""
        unit: Unit = unit_of(sharded)
        if self._reads and unit not in self._runs:
            _refuse_transforms(unit)
            root = root_of(unit)
            assert root is not None
            with alone(root.device):
                self._runs[unit] = _gather(unit, root)
        place = next(i for i, p in enumerate(unit.parameters) if p.sharded is sharded)
        if not torch.is_grad_enabled() and sharded.requires_grad:  # perhaps inside a torch.autograd.Function
            register(sharded, WholeGradient(partial(_part_of_mean, weakref.ref(unit), place)))
        return unit.parameters[place].full

    def end(self, result: Any, entry: int) -> Any:
        """Mark the results, and release the weights that no later use needs."""
        result = map_tensors(self._own_memory, result)
        for unit, run in self._runs.items():
            root = root_of(unit)
            assert root is not None
            with alone(root.device):
                _mark(unit, root, run, result, entry)
                if run is not None and (root.caller is None or root.runs.ends_with_last(run)):
                    root.end_run(run)
        return result

    def _own_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a view of the weights, whose memory may be released soon."""
        plain = plain_of(tensor)
        views = plain.layout is torch.strided and any(unit.weights.has(plain) for unit in self._runs)
        return tensor.clone() if views else tensor


def _part_of_mean(ref: weakref.ref[Unit], place: int, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the mean of a whole gradient, which a ``torch.autograd.Function`` has returned."""
    unit = ref()
    assert unit is not None
    parameter = unit.parameters[place]
    if parameter.cut.parallel is not None:
        raise NotImplementedError(
            f"A torch.autograd.Function got the tensor-parallel parameter {parameter.name!r} of unit {unit.name!r} "
            "without a call of the unit, and returned a gradient of its whole. Call the function inside the forward of "
            "the unit's module."
        )
    sharded: Any = parameter.sharded
    mean = average(gradient, sharded.device_mesh, recipe_of(sharded))
    return parameter.cut.wrap(parameter.cut.part_of(mean).clone())  # type: ignore[no-any-return]


def _refuse_transforms(unit: Unit) -> None:
    if lasting_kind() is not None:
        raise NotImplementedError(
            f"Weights of unit {unit.name!r} are used without a call of the unit inside a transform of torch.func, a "
            "trace of make_fx, or allow_mutation_on_saved_tensors. Call the module of the unit there, or use the "
            "weights outside."
        )


def _gather(unit: Unit, root: Root) -> Run | None:
    """Gather a unit for an operation, or use what is gathered. Returns the run of which the operation is a part."""
    if unit.watch.unsharded:
        unit.refuse_unsharded("A use of weights of")
    unit.weights.forms.ever_shown = True
    run = None
    if in_backward():
        root.enter_backward()
        if not unit.weights.gathered:
            issue(unit, root.clock.call)
    elif not unit.activity.calls:
        if root.caller is None:
            root.recover_if_failed()
        if at_rest(unit):
            settle_now(unit)
        follow_requires_grad(unit)
        run = root.reach_run(unit)
    unit.weights.wait()
    return run


def _mark(unit: Unit, root: Root, run: Run | None, result: Any, entry: int) -> None:
    """Let backward gather the unit when it reaches a result."""
    recomputing = in_backward()
    if not torch.is_grad_enabled() or (recomputing and unit.activity.visits):
        return
    visit = run.visit if run is not None else None
    if visit is None:
        visit = root.visits.apart(unit, BACKWARD, ordered=run is not None and root.caller is not None)
        visit.calls, visit.endless = 1, True
    if not mark_outputs(visit, result, entry):
        return
    visit.returns = True
    visit.end = root.clock.tick()
    host = root.visits.innermost()
    if host is not None and host.unit is not unit and host not in visit.hosts:
        visit.hosts.append(host)
    if unit.stepping is not None or unit.site.neighbours is not None:
        unit.activity.expect(visit)
    if run is not None:
        run.visit = visit
