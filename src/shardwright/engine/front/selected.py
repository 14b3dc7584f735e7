"""Backward to selected parameters: ``backward(inputs=...)`` and ``torch.autograd.grad``.

Modules compute with full parameters, but users select sharded ones. So this file adds the full parameters to the
selection before autograd sees it. The sharded ones stay: a penalty uses them directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from shardwright.engine.compat.autograd import (
    in_backward,
    leaf_of,
    post_accumulate_grad_hooks,
    set_grad,
    set_post_accumulate_grad_hooks,
    watch_backward,
)
from shardwright.engine.compat.modes import NOTHING, is_transformed
from shardwright.engine.model.kept_tensors import mark_kept
from shardwright.engine.model.root import Root, roots, running_backward, selecting
from shardwright.engine.tensors.parameter import STANDS_FOR, Managed, unit_of
from shardwright.engine.tensors.ragged.numbers import Number, read_number
from shardwright.engine.tensors.rows.tensor import ShardedTensor, average_number, is_real
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import complete, reduces_now
from shardwright.engine.weights.unready import explain, explain_stepped

Runner = Callable[..., Any]
#: The unit and the full form of a selected parameter.
Target = tuple[Unit, torch.Tensor]


@functools.cache
def hook_backward() -> None:
    """Let backward replace sharded parameters among its inputs. Done once."""
    watch_backward(_run)


def _run(original: Runner, *args: Any, **options: Any) -> Any:
    inner = in_backward()
    with NOTHING if inner else running_backward():
        _average_roots(args[0])
        mark_kept(args[0])
        if inner and args[4] and not options.get("accumulate_grad"):
            _refuse_inside_backward(args[4])
        try:
            if not args[4]:  # inputs
                with selecting(None) if inner else NOTHING:
                    return original(*args, **options)
            selected = [_parameter_of(each) for each in args[4]]
            targets = _targets(selected)
            with selecting({unit for unit, _ in targets.values()}):
                return _run_selected(original, selected, targets, *args, **options)
        except RuntimeError as error:
            explain(error, backward=True)
            running = [root for root in list(roots) if root.backward]
            explain_stepped(error, (unit.name for root in running for unit in root.stepped_units()))
            raise


def _refuse_inside_backward(inputs: Sequence[Any]) -> None:
    """Raise if a ``torch.autograd.grad`` inside a backward asks for gradients that are reduced when that one ends."""
    for each in inputs:
        if isinstance(each, torch.Tensor):
            unit = unit_of(each if isinstance(each, Managed) else each.__dict__.get(STANDS_FOR, each))
            if unit is not None and unit.root is not None and unit.root.backward and not unit.activity.calls:
                raise RuntimeError(
                    f"torch.autograd.grad inside another backward got parameters of unit {unit.name!r}, whose forward "
                    "ran in that backward: their gradients are reduced only when it ends. Call it outside of the "
                    "backward, or call backward() there, which adds to .grad."
                )


def _run_selected(
    original: Runner,
    selected: list[torch.Tensor | None],
    targets: dict[int, Target],
    *args: Any,
    **options: Any,
) -> Any:
    outputs, gradients, retain, create, inputs, *rest = args
    if any(map(is_transformed, gradients)) and any(isinstance(p, Managed) for p in selected):
        raise RuntimeError(
            "torch.autograd.grad with is_grads_batched=True got sharded parameters, but gradients are reduced over "
            "the ranks for one backward at a time. Call it once for each row of grad_outputs."
        )
    if not targets:
        return original(*args, **options)
    run = functools.partial(original, outputs, gradients, retain, create)
    if options.get("accumulate_grad"):
        with _ending(targets):
            return run((*inputs, *(full for _, full in targets.values())), *rest, **options)
    allow_unused = rest[0] if rest else options.pop("allow_unreachable")
    with _ending(targets):
        return _gradients(functools.partial(run, **options), inputs, selected, targets, allow_unused)


def _average_roots(outputs: Sequence[Any]) -> None:
    """Average the gradients of numbers (penalties) from which a backward starts: the user may weigh each rank's."""
    for output in outputs:
        if isinstance(output, ShardedTensor) and not output.dim() and is_real(output):
            average_number(output)
        elif isinstance(output, Number):
            read_number(output)


@contextmanager
def _ending(targets: dict[int, Target]) -> Iterator[None]:
    """At the end, also end the backward of models that it did not reach on this rank; on other ranks it may have."""
    roots = cast("list[Root]", list(dict.fromkeys(unit.root for unit, _ in targets.values())))
    before = [(root, root.clock.call) for root in roots if not root.backward and root.caller is None]
    yield
    for root, call in before:
        if root.clock.call == call:
            root.end_unreached_backward()


def _parameter_of(selected: Any) -> torch.Tensor | None:
    """The selected tensor; the user may pass the tensor or its edge of the graph."""
    return selected if isinstance(selected, torch.Tensor) else leaf_of(selected.node)


def _targets(selected: Sequence[torch.Tensor | None]) -> dict[int, Target]:
    """By id, the selected sharded parameters, with their units and full forms."""
    units: dict[int, tuple[Unit, dict[int, torch.Tensor]]] = {}
    targets: dict[int, Target] = {}
    for p in selected:
        # torch raises an error for a parameter that needs no gradient.
        unit = unit_of(p) if isinstance(p, Managed) and p.requires_grad else None
        if unit is None or unit.root is None:
            continue
        if id(unit) not in units:
            unit.root.recover_if_failed()
            if unit.root.caller is None and not unit.root.backward:
                unit.root.compute_as(False)  # graphs use the weights in their compute dtype
            units[id(unit)] = unit, {id(q.sharded): q.full for q in unit.parameters}
        full = units[id(unit)][1].get(id(p))
        if full is not None and full.requires_grad:
            targets[id(p)] = unit, full
    return targets


def _gradients(
    run: Runner,
    inputs: Sequence[Any],
    selected: Sequence[torch.Tensor | None],
    targets: dict[int, Target],
    allow_unused: bool,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the selected tensors. Those of a parameter through modules are reduced, and then added."""
    units = {id(unit): unit for unit, _ in targets.values()}
    for unit in units.values():
        _refuse_unreduced(unit)
    parameters = {id(p): p for p in selected if p is not None and id(p) in targets}
    with _set_aside(list(parameters.values())):
        handles = [full.register_hook(_keep(unit, full)) for unit, full in targets.values()]
        try:
            results = list(run((*inputs, *(full for _, full in targets.values())), True))[: len(inputs)]
        finally:
            for handle in handles:
                handle.remove()
        for unit in units.values():
            complete(unit)
        for i, p in enumerate(selected):
            if id(p) in parameters:
                results[i] = _added(results[i], parameters[id(p)].grad)
    if not allow_unused and any(result is None for result in results):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    return tuple(results)


def _added(direct: torch.Tensor | None, reduced: torch.Tensor | None) -> torch.Tensor | None:
    if direct is None or reduced is None:
        return reduced if direct is None else direct
    return reduced + direct


def _keep(unit: Unit, full: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Store a gradient that autograd captured in ``.grad`` of the full parameter, where reductions find it."""

    def keep(gradient: torch.Tensor) -> None:
        set_grad(full, gradient)
        unit.on_gradient(full)

    return keep


@contextmanager
def _set_aside(parameters: list[torch.Tensor]) -> Iterator[None]:
    """A context in which the parameters have no gradient and no hooks for added gradients."""
    before = [(p, p.grad, post_accumulate_grad_hooks(p)) for p in parameters]
    for p in parameters:
        p.grad = None
        set_post_accumulate_grad_hooks(p, None)
    try:
        yield
    finally:
        for p, gradient, hooks in before:
            p.grad = gradient
            set_post_accumulate_grad_hooks(p, hooks)


def _refuse_unreduced(unit: Unit) -> None:
    """Raise if this backward would not reduce its gradients at its end, or if earlier gradients are held."""
    if unit.stepping is not None:
        raise RuntimeError(
            f"torch.autograd.grad got parameters of unit {unit.name!r}, whose optimizer steps in backward and uses "
            "their gradients there. Call leave_backward() of that optimizer first."
        )
    if unit.gradients.held or not reduces_now(unit):
        raise RuntimeError(
            f"torch.autograd.grad got parameters of unit {unit.name!r}, which holds gradients of micro-batches and "
            "does not reduce them now. So there is no reduced gradient to return. Switch gradient synchronisation on "
            "(set_requires_gradient_sync, set_requires_all_reduce, set_is_last_backward), and call it after an "
            "optimizer's step."
        )
