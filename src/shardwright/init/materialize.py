"""``materialize``: gives a model's parameters and buffers their values, straight into shards where it is sharded.

Deferred tensors bring their recording along. For those on the meta device an initialiser is run on deferred stand-ins,
so that it draws what it would draw for whole tensors, and it is known what it left out before anything is changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright._torch import share_gradient_hooks
from shardwright.engine.construct import UNIT
from shardwright.engine.module import original_class
from shardwright.engine.parameter import (
    TAKEN,
    Managed,
    ManagedParameter,
    Slot,
    Taken,
    has_no_values,
    unit_of,
)
from shardwright.engine.root import hook_optimizers
from shardwright.engine.unit import Unit
from shardwright.init.context import deferred_init
from shardwright.init.log import Entry, Memory, View, plan
from shardwright.init.recorder import RECORDER, UNNAMED, DeferredTensor
from shardwright.init.replay import Materialise, replay


def materialize(
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    init: Callable[[], Any] | None = None,
) -> nn.Module:
    """Give every parameter and buffer that has no values yet its values, in place, and return the model.

        sw.materialize(model)                           # built under sw.deferred_init()
        sw.materialize(model, init=model.init_weights)  # built under torch.device("meta")

    A deferred model gets, bit by bit, the values of the model built on that device with the same seed, on any number
    of ranks and in any layout, and the generators are left as that build leaves them. Parameters that a unit owns are
    written into the shards, each whole tensor existing only while its own operations run. Ranks do not communicate;
    each runs the same operations, so all must start with the same seed. Parameters that hold values already, loaded
    ones among them, keep them.

    On the meta device nothing was recorded, so values come from ``init``, or without it from the ``reset_parameters``
    (or ``_reset_parameters``) of each module that owns such parameters or buffers: every module once, inner ones first.
    Random operations draw the numbers that the whole tensors would have drawn.

    Args:
        device: where tensors go whose constructor named no device. Default: that of the mesh, or the CPU if nothing
            is sharded.
        init: called without arguments, once, for models on the meta device.

    Raises:
        ValueError: parameters or buffers that nothing initialises, with the class of their module; nothing was
            changed then. Or ``device`` is not that of the mesh.
        RuntimeError: numbers were drawn between ``deferred_init`` and here, or a tensor that the constructor read has
            changed since.

    Warns:
        UserWarning: on the meta path, parameters that were initialised more than once; the last one counts.
    """
    where = _device(model, device)
    states = [(stream, stream.generator.get_state()) for stream in RECORDER.streams.defaults()]
    try:
        stand_ins = _initialise(model, init)
    except BaseException:
        for stream, state in states:
            stream.generator.set_state(state)
        raise
    destinations = _Destinations()
    for module, name, old, new in stand_ins:
        destinations.add(module, name, old, new)
    for unit in _units(model):
        for sharded, source in unit.without_values().items():
            if isinstance(source, DeferredTensor):
                p = unit.managed(sharded)
                assert p is not None
                destinations.of(source).shards.append((p, source))
    for module in model.modules():
        destinations.add_own(module)
    if destinations.by_memory:
        _replay(destinations, where)
    for put in destinations.real:
        put()
    hook_optimizers()
    return model


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    of_mesh = next((unit.ranks.device for unit in _units(model)), None)
    wanted = torch.device(device) if device is not None else of_mesh or UNNAMED
    if of_mesh is not None and wanted.type != of_mesh.type:
        raise ValueError(
            f"The model is sharded over a mesh on {of_mesh.type!r} and cannot be materialized on {wanted}. Leave device "
            "out, or shard over a mesh of that device."
        )
    return of_mesh or wanted


def _units(model: nn.Module) -> list[Unit]:
    found = [module.__dict__.get(UNIT) for module in model.modules()]
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def _replay(destinations: _Destinations, where: torch.device) -> None:
    targets = destinations.by_memory
    streams = RECORDER.streams.waiting()
    positions = {stream: stream.position() for stream in streams}
    drawing = {stream: at for stream, at in positions.items() if isinstance(at, Entry)}
    others = [memory for memory in RECORDER.live() if memory not in targets]
    ends = replay(
        targets,
        lambda memory, tensor: targets[memory].deliver(tensor),
        device=where,
        drawing=drawing,
        keep=set(plan(others).entries),
    )
    for stream in streams:
        stream.last = None
    for stream, state in ends.items():
        stream.resume(state)
    for memory in targets:
        memory.gone = "its model was materialized; take the tensor that the model has now"


# -- where values go ---------------------------------------------------------------------------------------------------


class _Memory:
    """What becomes of one deferred memory: parts of it in shards, and tensors that view it."""

    def __init__(self) -> None:
        self.shards: list[tuple[ManagedParameter, DeferredTensor]] = []
        self.tensors: dict[torch.Tensor, tuple[View, Holder]] = {}

    def deliver(self, tensor: Materialise) -> None:
        for p, source in self.shards:
            p.take_values(tensor(RECORDER.view_of(source)))
        for old, (view, holder) in self.tensors.items():
            _become(old, tensor(view), holder)


class Holder(NamedTuple):
    """The places where modules hold a tensor."""

    slots: list[Slot]
    buffers: list[tuple[dict[str, Any], str]]
    attributes: list[nn.Module]


class _Destinations:
    def __init__(self) -> None:
        self.by_memory: dict[Memory, _Memory] = {}
        self.real: list[Callable[[], None]] = []  #: what puts values in place that are there already

    def of(self, tensor: DeferredTensor) -> _Memory:
        return self.by_memory.setdefault(RECORDER.view_of(tensor).memory, _Memory())

    def add_own(self, module: nn.Module) -> None:
        """Deferred tensors that the module holds: as parameters, buffers or attributes."""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if isinstance(tensor, DeferredTensor):
                self.add(module, name, tensor, tensor)
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                for tensor in _deferred_in(value):
                    self._holder(tensor, tensor).attributes.append(module)

    def add(self, module: nn.Module, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
        """What ``module`` holds under ``name``, ``old``, gets the values of ``new``."""
        if isinstance(old, Managed):
            p = unit_of(old).managed(old)
            if isinstance(new, DeferredTensor):
                self.of(new).shards.append((p, new))
            else:
                self.real.append(lambda: p.take_values(new))
        elif isinstance(new, DeferredTensor):
            holder = self._holder(old, new)
            if name in module._parameters:
                holder.slots.append(Slot.of(module, name))
            else:
                holder.buffers.append((module._buffers, name))
        else:
            registry: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            self.real.append(lambda: registry.__setitem__(name, new))

    def _holder(self, old: torch.Tensor, new: DeferredTensor) -> Holder:
        view = RECORDER.view_of(new)
        memory = self.by_memory.setdefault(view.memory, _Memory())
        return memory.tensors.setdefault(old, (view, Holder([], [], [])))[1]


def _deferred_in(value: Any) -> Iterator[DeferredTensor]:
    if isinstance(value, DeferredTensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _deferred_in(inner)
    elif isinstance(value, (list, tuple, set)):
        for inner in value:
            yield from _deferred_in(inner)


def _become(old: torch.Tensor, values: torch.Tensor, holder: Holder) -> None:
    """Turn ``old`` into a real tensor: the same object if nothing forbids it, else another in all its places."""
    new: Any = values
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(values, requires_grad=old.requires_grad)
    elif old.requires_grad and old.is_leaf:
        new = values.requires_grad_()
    share_gradient_hooks(old, new)
    new.__dict__.update({key: value for key, value in vars(old).items() if key != "_is_param"})
    try:
        torch.utils.swap_tensors(old, new)
        return
    except RuntimeError:  # something refers to it weakly, or a graph holds it
        pass
    old.__dict__[TAKEN] = Taken(f"of shape {tuple(old.shape)}", new)
    for slot in holder.slots:
        slot.show(new)
    for registry, name in holder.buffers:
        registry[name] = new
    for module in holder.attributes:
        for key, value in vars(module).items():
            if any(tensor is old for tensor in _deferred_in(value)):
                module.__dict__[key] = _replaced(value, old, new)


def _replaced(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    if value is old:
        return new
    if isinstance(value, dict):
        value.update({key: _replaced(inner, old, new) for key, inner in value.items()})
    elif isinstance(value, list):
        value[:] = [_replaced(inner, old, new) for inner in value]
    elif isinstance(value, (tuple, set)) and any(tensor is old for tensor in _deferred_in(value)):
        inner = [_replaced(v, old, new) for v in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    return value


# -- models on the meta device -----------------------------------------------------------------------------------------


class _StandIn(NamedTuple):
    """What stands, deferred, in the place of a tensor without values while a model is initialised."""

    module: nn.Module
    name: str
    old: torch.Tensor
    new: torch.Tensor


def _initialise(model: nn.Module, init: Callable[[], Any] | None) -> list[_StandIn]:
    """Run initialisers for what is on the meta device, recording them. The model is as it was afterwards."""
    units = _units(model)
    unset = {id(q) for unit in units for q, source in unit.without_values().items() if source.is_meta}

    def missing(tensor: torch.Tensor | None) -> bool:
        return tensor is not None and (tensor.is_meta or id(tensor) in unset)

    owners = [m for m in _inner_first(model) if any(missing(t) for t in _own(m).values())]
    if not owners:
        if init is not None:
            raise ValueError(
                f"materialize got init, but every parameter and buffer of this {type(model).__name__} holds values or is "
                "deferred. Leave init out, or build the model on torch.device('meta')."
            )
        return []
    put: dict[int, torch.Tensor] = {}
    places: list[tuple[nn.Module, str, torch.Tensor]] = []
    paused = [unit for unit in units if not unit.settling_paused]
    for unit in paused:
        unit.settling_paused = True
    try:
        with deferred_init(), torch.no_grad():
            for module in list(model.modules()) if init is not None else owners:
                for name, old in _own(module).items():
                    if isinstance(old, DeferredTensor):
                        continue
                    if id(old) not in put:
                        new: torch.Tensor = RECORDER.uninitialised(old)
                        put[id(old)] = nn.Parameter(new, old.requires_grad) if name in module._parameters else new
                    places.append((module, name, old))
                    _show(module, name, put[id(old)])
            if init is not None:
                init()
            else:
                for module in owners:
                    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
                    if reset is not None:  # else an outer module may know; what nobody knows is found below
                        reset()
        found = [_StandIn(module, name, old, _own(module)[name]) for module, name, old in places]
    finally:
        for module, name, old in reversed(places):
            _show(module, name, old)
        for unit in paused:
            unit.settling_paused = False
    found = [each for each in found if missing(each.old)]
    _check(model, found)
    return list({id(each.old) if isinstance(each.old, Managed) else id(each): each for each in found}.values())


def _inner_first(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _inner_first(child, seen)
        yield module


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that the module itself holds."""
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _show(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name in module._parameters:
        Slot.of(module, name).show(tensor)  # type: ignore[arg-type]
    else:
        module._buffers[name] = tensor


def _check(model: nn.Module, found: list[_StandIn]) -> None:
    names = {id(module): name for name, module in model.named_modules()}

    def full_name(each: _StandIn) -> str:
        return f"{names[id(each.module)]}.{each.name}".lstrip(".")

    by_class: dict[str, list[str]] = {}
    twice: list[str] = []
    for each in found:
        if each.new.shape != each.old.shape:
            raise ValueError(
                f"{full_name(each)!r} has shape {tuple(each.old.shape)}, and its initialiser put one of shape "
                f"{tuple(each.new.shape)} in its place. Initialise it in its own shape."
            )
        if not isinstance(each.new, DeferredTensor):
            if has_no_values(each.new):
                by_class.setdefault(_class_name(each.module), []).append(full_name(each))
            continue
        memory = RECORDER.view_of(each.new).memory
        if not memory.entries and each.new.numel():
            by_class.setdefault(_class_name(each.module), []).append(full_name(each))
        elif sum(memory in entry.renews for entry in memory.entries) > 1:
            twice.append(full_name(each))
    if by_class:
        told = "; ".join(f"{cls}: {', '.join(map(repr, names_))}" for cls, names_ in by_class.items())
        raise ValueError(
            f"Nothing initialises these parameters and buffers, which are on the meta device: {told}. Give their class "
            "a reset_parameters method, pass init= to materialize, or build the model under "
            "shardwright.deferred_init(). Nothing was changed."
        )
    if twice:
        warnings.warn(
            f"Initialised more than once, the last one counts: {', '.join(map(repr, dict.fromkeys(twice)))}.",
            stacklevel=3,
        )


def _class_name(module: nn.Module) -> str:
    return (original_class(type(module)) if UNIT in module.__dict__ else type(module)).__name__
