"""Models on the meta device: their initialisers run on deferred stand-ins, so their operations are recorded.

So they draw the numbers for whole tensors. Tensors that no initialiser writes are known before anything changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.engine import UNIT, Managed, Slot, Unit, has_no_values, inner_first, original_class, unit_of
from shardwright.engine.compat import tree_flatten
from shardwright.init.context import deferred_init, refuse_on_meta
from shardwright.init.log import Memory, ReplayPlan, View, plan
from shardwright.init.recorder import RECORDER, DeferredTensor


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of the model's modules, and units of outer modules that own parameters of the model."""
    units: dict[Unit | None, None] = {}
    for module in model.modules():
        units[module.__dict__.get(UNIT)] = None
        units.update((unit_of(p), None) for p in module._parameters.values() if p is not None)
    return [unit for unit in units if unit is not None]


class StandIn(NamedTuple):
    """A deferred tensor that replaces a tensor without values while a model is initialised."""

    module: nn.Module
    name: str
    old: torch.Tensor
    new: torch.Tensor


def initialise(model: nn.Module, init: Callable[[], Any] | None) -> list[StandIn]:
    """Run and record initialisers for tensors on the meta device. Afterwards the model is unchanged."""
    units = units_of(model)
    unset = {id(q): source for unit in units for q, source in unit.without_values().items() if source.is_meta}

    def missing(tensor: torch.Tensor | None) -> bool:
        return tensor is not None and (tensor.is_meta or id(tensor) in unset)

    owners = [m for m in inner_first(model) if any(missing(t) for t in _own(m).values())]
    if not owners:
        if init is not None:
            raise ValueError(
                f"materialize got init, but every parameter and buffer of this {type(model).__name__} holds values "
                "or is deferred. Call materialize without init, or build the model on torch.device('meta')."
            )
        return []
    refuse_on_meta("materialize")
    put: dict[int, torch.Tensor] = {}
    places: list[tuple[nn.Module, str, torch.Tensor]] = []
    paused = [unit for unit in units if not unit.watch.paused]
    for unit in paused:
        unit.watch.paused = True
    try:
        with deferred_init(), torch.no_grad():
            for module in list(model.modules()) if init is not None else owners:
                for name, old in _own(module).items():
                    if isinstance(old, DeferredTensor):
                        continue
                    if id(old) not in put:
                        # The order of random draws depends on strides, which layouts may change.
                        new: torch.Tensor = RECORDER.uninitialised(old, unset.get(id(old), old).stride())
                        put[id(old)] = (
                            nn.Parameter(new, old.requires_grad) if name in module._parameters else new
                        )
                    places.append((module, name, old))
                    _show(module, name, put[id(old)])
            if init is not None:
                init()
            else:
                for module in owners:
                    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
                    if reset is not None:  # else an outer module may initialise it; see below
                        reset()
        stand_ins = [StandIn(module, name, old, _own(module)[name]) for module, name, old in places]
    finally:
        for module, name, old in reversed(places):
            _show(module, name, old)
        for unit in paused:
            unit.watch.paused = False
    kept = {
        RECORDER.memories.of(put[id(each.old)]): each for each in stand_ins if not missing(each.old)
    }  # their values stay, so the records of their stand-ins are dropped
    stand_ins = [each for each in stand_ins if missing(each.old)]
    _check(model, stand_ins, kept)
    return list(
        {id(each.old) if isinstance(each.old, Managed) else id(each): each for each in stand_ins}.values()
    )


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's own parameters and buffers."""
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _show(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name in module._parameters:
        Slot.of(module, name).show(tensor)  # type: ignore[arg-type]
    else:
        module._buffers[name] = tensor


def _check(model: nn.Module, stand_ins: list[StandIn], kept: dict[Memory, StandIn]) -> None:
    names = {id(module): name for name, module in model.named_modules()}

    def full_name(each: StandIn) -> str:
        return f"{names[id(each.module)]}.{each.name}".lstrip(".")

    by_class: dict[str, list[str]] = {}
    twice: list[str] = []
    for each in stand_ins:
        if each.new.shape != each.old.shape:
            raise ValueError(
                f"{full_name(each)!r} has shape {tuple(each.old.shape)}, but its initialiser replaced it by a tensor "
                f"of shape {tuple(each.new.shape)}. Keep the shape."
            )
        if not isinstance(each.new, DeferredTensor):
            if has_no_values(each.new):
                by_class.setdefault(_class_name(each.module), []).append(full_name(each))
            continue
        memory = RECORDER.memories.view_of(each.new).memory
        if not memory.entries and each.new.numel():
            by_class.setdefault(_class_name(each.module), []).append(full_name(each))
        elif sum(memory in entry.renews for entry in memory.entries) > 1:
            twice.append(full_name(each))
    if by_class:
        names_by_class = "; ".join(
            f"{cls}: {', '.join(map(repr, names_))}" for cls, names_ in by_class.items()
        )
        raise ValueError(
            f"No initialiser writes these parameters and buffers, which are on the meta device: {names_by_class}. "
            "Give their class a reset_parameters method, pass init= to materialize, or build the model under "
            "shardwright.deferred_init(). Nothing was changed."
        )
    views = {
        each: RECORDER.memories.view_of(each.new)
        for each in stand_ins
        if isinstance(each.new, DeferredTensor)
    }
    the = plan(view.memory for view in views.values())
    read = [full_name(kept[memory]) for memory in the.unwritten if memory in kept]
    if read:
        raise ValueError(
            f"The initialiser reads {', '.join(map(repr, read))}, which have values already, to compute other "
            "tensors. Compute these after materialize, or build the model under shardwright.deferred_init(). Nothing "
            "was changed."
        )
    unfilled = _unfilled(the, views.values())
    parts = [full_name(each) for each, view in views.items() if view.memory in unfilled]
    if parts:
        raise ValueError(
            f"The initialiser reads {', '.join(map(repr, parts))} before it has written all of it, or leaves a part "
            "unwritten. On the meta device a tensor has no values. Let the initialiser fill the whole tensor first, "
            "or build the model under shardwright.deferred_init(). Nothing was changed."
        )
    if twice:
        warnings.warn(
            "These tensors were initialised more than once; the last values count: "
            f"{', '.join(map(repr, dict.fromkeys(twice)))}.",
            stacklevel=4,  # the caller of materialize
        )


def _unfilled(the: ReplayPlan, views: Collection[View]) -> set[Memory]:
    """Memories of ``wanted`` with needed elements that no entry has written."""
    memories = {view.memory for view in views} & the.unwritten
    written = {m: torch.zeros(m.storage.nbytes(), dtype=torch.bool, device="cpu") for m in memories}

    def first_bytes(view: View) -> torch.Tensor:
        width = view.dtype.itemsize
        strides = [stride * width for stride in view.stride]
        return written[view.memory].as_strided(view.size, strides, view.offset * width)

    unwritten: set[Memory] = set()
    for entry in the.entries:
        for view in tree_flatten((entry.args, entry.kwargs))[0]:
            is_filled = not isinstance(view, View) or view.memory not in written or view in entry.fills
            if not is_filled and not first_bytes(view).all():
                unwritten.add(view.memory)
        for view in entry.fills:
            if view.memory in written:
                first_bytes(view).fill_(True)
    unwritten.update(view.memory for view in views if view.memory in written and not first_bytes(view).all())
    return unwritten


def _class_name(module: nn.Module) -> str:
    return (original_class(type(module)) if UNIT in module.__dict__ else type(module)).__name__
