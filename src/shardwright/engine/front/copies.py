"""``deepcopy`` of sharded models, and conversions such as ``.to(dtype)`` of them.

Both make units' memory again (``unit/owning.py``). A copy shares no tensor with its original and has no gradients, as
copies of plain models. It gets the settings of the original's units. Its gradient hook is a copy with the same state.
Codecs and the user's own collectives are shared.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.engine.assembly.find import UNIT, ShardPlacementFn, ShardPlacementResult, find_parameters
from shardwright.engine.comm import GradientHook
from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.compat.fully_shard import unmark_fully_sharded
from shardwright.engine.gradients.stepping import forget_stepped
from shardwright.engine.model.calls import Calls
from shardwright.engine.tensors.edits.unset import carry_mark, mark_of
from shardwright.engine.tensors.extension import is_attached
from shardwright.engine.tensors.parameter import ManagedParameter, become
from shardwright.engine.tensors.ragged.tensor import RaggedTensor
from shardwright.engine.unit.owning import remake, settle, take_over
from shardwright.engine.unit.unit import Unit

Install = Callable[[Unit, list[nn.Module]], None]

_NOT_COPIED = (UNIT, "_compiled_call_impl")
"""Attributes of a module that belong to it alone. ``nn.Module.compile`` sets a function that calls the original, and
torch's own copies are not compiled."""
_UNITS = "shardwright units"  #: in a deepcopy's memo: the units whose modules are being copied


def deepcopy_module(module: nn.Module, memo: dict[Any, Any], original: type, install: Install) -> nn.Module:
    """A deep copy of a sharded ``module``, sharded in the same way. ``original`` is its class without ours."""
    module.__dict__[UNIT].refuse_unsharded("deepcopy of")
    outermost = _UNITS not in memo
    units: dict[int, Unit] = memo.setdefault(_UNITS, {})
    unit: Unit = module.__dict__[UNIT]
    settle(unit)
    in_use = unit.weights.forms.full_shown
    unit.weights.show_sharded()
    units[id(unit)] = unit
    result: nn.Module = object.__new__(original)
    memo[id(module)] = result
    try:
        with _without_unit(module, unit):
            state = copy.deepcopy(
                module.__getstate__(), memo
            )  # as of a plain module, whose class may have its own
    finally:
        if in_use:
            unit.weights.forms.show_full()
    result.__setstate__(state)
    unmark_fully_sharded(result)
    if outermost:
        # Inner units first, as fully_shard was called; a list unit waits until the last of its modules is there.
        del memo[_UNITS]
        for old in sorted(units.values(), key=lambda u: u.serial):
            modules = [memo.get(id(m)) for m in old.watch.modules()]
            if all(m is not None for m in modules):
                _copy_unit(old, [m for m in modules if m is not None], memo, install)
            else:
                memo.setdefault(_UNITS, {})[id(old)] = old
        if not memo.get(_UNITS, True):
            del memo[_UNITS]
    return result


@contextmanager
def _without_unit(module: nn.Module, unit: Unit) -> Iterator[None]:
    """A context in which the module's attributes are those of a plain module."""
    attributes = module.__dict__
    before = dict(attributes)
    for key in _NOT_COPIED:
        attributes.pop(key, None)
    attributes.update({key: _without(unit, value) for key, value in attributes.items()})
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(before)


def _without(unit: Unit, value: Any) -> Any:
    """A module's attribute; if it is a table of hooks, without this unit's hooks."""
    if not isinstance(value, OrderedDict):
        return value
    return OrderedDict(
        (key, hook) for key, hook in value.items() if not _is_of(unit, getattr(hook, "__self__", None))
    )


def _is_of(unit: Unit, calls: Any) -> bool:
    return isinstance(calls, Calls) and calls.unit is unit


def _copy_unit(old: Unit, modules: list[nn.Module], memo: dict[Any, Any], install: Install) -> None:
    olds = [old, *old.siblings]
    news = [_like(each, modules, memo) for each in olds]
    for each in olds:
        if each.without_values():
            raise RuntimeError(
                f"Unit {each.name!r} was sharded deferred or on the meta device and has no values to copy yet. Call "
                "shardwright.materialize first."
            )
        for p in each.parameters:
            if is_attached(p.local):
                raise RuntimeError(
                    f"Parameter {p.name!r} of unit {each.name!r} cannot be copied: fsdp_pre_all_gather was attached "
                    "to its local tensor, and it belongs to that object alone. Define it on the parameter's class "
                    "before fully_shard."
                )
    parameters_of_units = [
        find_parameters(
            modules,
            new.watch.ignored(),
            new.ranks,
            _mesh_of_copies(olds, memo),
            sibling=new is not news[0],
        )
        for new in news
    ]
    take_over(news, parameters_of_units)
    install(news[0], modules)


def _mesh_of_copies(olds: list[Unit], memo: dict[Any, Any]) -> ShardPlacementFn:
    """A placement function that gives each copied parameter the mesh of its original."""
    meshes = {id(memo.get(id(p.sharded))): unit.mesh for unit in olds for p in unit.parameters}
    return lambda p: ShardPlacementResult(None, mesh) if (mesh := meshes.get(id(p))) is not None else None


def _like(old: Unit, modules: list[nn.Module], memo: dict[Any, Any]) -> Unit:
    """A unit with the settings of ``old`` and no parameters yet."""
    settings = old.settings
    transport = settings.transport
    if transport.hook is not None:
        transport = replace(transport, hook=_copy_hook(old, memo))
    all_reduce_hook = copy.deepcopy(settings.all_reduce_hook, memo)
    new = Unit(
        modules,
        ranks=old.ranks,
        arguments=old.arguments,
        settings=replace(settings, transport=transport, all_reduce_hook=all_reduce_hook),
        ignored=[memo.get(id(p), p) for p in old.watch.ignored()],
        ignored_modules=[memo.get(id(m), m) for m in old.watch.ignored_modules()],
    )
    new.options, new.values.synced, new.values.checked = old.options, old.values.synced, old.values.checked
    memo[id(old)] = new
    for name in ("forward_prefetch", "backward_prefetch"):
        units = [memo.get(id(u), u) for ref in getattr(settings, name) if (u := ref()) is not None]
        new.change(**{name: tuple(map(weakref.ref, units))})
    return new


def _copy_hook(old: Unit, memo: dict[Any, Any]) -> GradientHook | None:
    """One hook for all units of the copy, with the state of the original's hook."""
    hook = old.settings.transport.hook
    try:
        return copy.deepcopy(hook, memo)
    except Exception as error:
        raise RuntimeError(
            f"Unit {old.name!r} cannot be copied, since its gradient hook {type(hook).__name__} cannot be copied: "
            f"{error}. Give its class a __deepcopy__, or call set_gradient_comm_hook(None) for the copy."
        ) from error


# -- conversions -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def convert(
    module: nn.Module, units: list[Unit], fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool
) -> None:
    """``nn.Module._apply``: ``fn`` on the local part of every sharded parameter below, and on everything else."""
    modules = list(module.modules()) if recurse else [module]
    ids = {id(m) for m in modules}
    managed: set[int] = set()
    for unit in units:
        unit.refuse_unsharded("Conversion of")
    for unit in units:
        settle(unit)
        unit.release()
        here = [p for p in unit.parameters if any(id(slot.module()) in ids for slot in p.slots)]
        managed.update(id(p.sharded) for p in here)
        changed = [_convert_parameter(p, fn) for p in here]
        if any(changed):
            remake(unit)
    for each in modules:
        for parameter in each._parameters.values():
            if parameter is not None and id(parameter) not in managed:
                parameter.data = fn(parameter.data)
                if parameter.grad is not None:
                    parameter.grad.data = fn(parameter.grad.data)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = convert_buffer(buffer, fn)


def convert_buffer(buffer: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply ``fn`` to a buffer. The result still requires a gradient, and is still a leaf, if the buffer was so."""
    with torch.set_grad_enabled(not buffer.is_leaf):
        new = fn(buffer)
    differentiable = new.is_floating_point() or new.is_complex()
    return new.requires_grad_() if buffer.requires_grad and differentiable and new.is_leaf else new


def _convert_parameter(p: ManagedParameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Convert a parameter. Returns whether the unit's memory must be made again, because the dtype has changed."""
    new = fn(p.local)
    if new is p.local:
        return False
    if new.device != p.local.device:
        raise ValueError(
            f"Parameter {p.name!r} is sharded over a mesh on {p.local.device.type!r} and cannot move to {new.device}. "
            "Shard the model over a mesh of that device, or save its state dict and load it there."
        )
    forget_stepped([p.sharded])
    if new.dtype != p.local.dtype and is_attached(p.local):
        raise ValueError(
            f"Parameter {p.name!r} cannot become {new.dtype}: fsdp_pre_all_gather was attached to its local tensor, "
            "and the conversion would make a new tensor without it. Convert the model before fully_shard."
        )
    gradient = p.sharded.grad
    new_gradient = None
    if gradient is not None:
        new_gradient = fn(local_of(gradient) if isinstance(gradient, (DTensor, RaggedTensor)) else gradient)
        p.sharded.grad = None
    if new.dtype == p.local.dtype:
        if mark_of(p.local) is None:  # else ``to_empty`` would seem to give it values
            p.local.copy_(new)
    else:
        become(p.sharded, p.cut.wrap(new))
        carry_mark(p.local, local_of(p.sharded))
    if new_gradient is not None:
        p.sharded.grad = p.cut.wrap(new_gradient)
    return new.dtype != p.local.dtype
