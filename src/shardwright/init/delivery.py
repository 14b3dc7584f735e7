"""``materialize``: gives a model's parameters and buffers their values, straight into shards where it is sharded.

The record of deferred tensors gives their values (``recorder.py``). For the meta device see ``stand_ins.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.engine import (
    Managed,
    ManagedParameter,
    has_no_values,
    hook_optimizers,
    is_refused,
    plain_of,
    refuse_while_deferring,
    unit_of,
)
from shardwright.engine.compat import exchange, local_of, share_gradient_hooks
from shardwright.init.log import Entry, Memory, View, plan
from shardwright.init.recorder import RECORDER, UNNAMED, DeferredTensor
from shardwright.init.replay import Materialise, replay
from shardwright.init.stand_ins import initialise, units_of


def materialize(
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    init: Callable[[], Any] | None = None,
) -> nn.Module:
    """Give every parameter and buffer that has no values yet its values, in place, and return the model.

        sw.materialize(model)                           # built under sw.deferred_init()
        sw.materialize(model, init=model.init_weights)  # built under torch.device("meta")

    A deferred model gets, bit for bit, the values of the model built on that device with the same seed. This holds on
    any number of ranks and in any layout. The generators end in the same state as after that build. Parameters of units
    are written into the shards; each whole tensor exists only while its operations run. Ranks do not communicate. Each
    runs the same operations, so all must start with the same seed. Parameters that already have values, such as loaded
    ones, keep them.

    On the meta device nothing was recorded, so values come from ``init``. Without it they come from
    ``reset_parameters`` (or ``_reset_parameters``) of each module that owns such parameters or buffers: each is called
    once, inner modules first. Random operations draw the numbers that the whole tensors would have drawn.

    Args:
        device: device of tensors whose constructor named no device. Default: the mesh's device, or the CPU if nothing
            is sharded.
        init: called without arguments, once, for models on the meta device.

    Raises:
        ValueError: names parameters or buffers that no initialiser writes, with the class of their module; nothing was
            changed then. Or ``device`` is not the mesh's device; or a tensor without values has a gradient, or is a
            buffer in a graph.
        RuntimeError: numbers were drawn between ``deferred_init`` and here, or a tensor that the constructor read has
            changed since.

    Warns:
        UserWarning: on the meta path, parameters that were initialised more than once; the last values count.
    """
    refuse_while_deferring("materialize")
    where = _device(model, device)
    refuse_graphs(model)
    states = [(stream, stream.generator.get_state()) for stream in RECORDER.streams.defaults()]
    try:
        stand_ins = initialise(model, init)
    except BaseException:
        for stream, state in states:
            stream.generator.set_state(state)
        raise
    destinations = _Destinations()
    for module, name, old, new in stand_ins:
        destinations.add(module, name, old, new)
    parameter_ids = {id(p) for module in model.modules() for p in module._parameters.values()}
    for unit in units_of(model):
        for sharded, source in unit.without_values().items():
            source = plain_of(source)
            if isinstance(source, DeferredTensor) and id(sharded) in parameter_ids:
                p = unit.managed(sharded)
                assert p is not None
                destinations.of(source).shards.append((p, source))
    for module in model.modules():
        destinations.add_own(module)
    if destinations.by_memory or RECORDER.streams.waiting():
        _replay(destinations, where)
    for put in destinations.real:
        put()
    for unit in units_of(model):
        unit.without_values()  # unmarks parameters that have values now
    if not RECORDER.memories.live():
        RECORDER.streams.forget()
    hook_optimizers()
    return model


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    of_mesh = next((unit.ranks.device for unit in units_of(model)), None)
    target = torch.device(device) if device is not None else of_mesh or UNNAMED
    if of_mesh is not None and target.type != of_mesh.type:
        raise ValueError(
            f"The model is sharded over a mesh on {of_mesh.type!r} and cannot be materialized on {target}. Call "
            "materialize without device, or shard over a mesh of that device."
        )
    return of_mesh or target


def refuse_graphs(model: nn.Module) -> None:
    """Raise if a buffer has a graph. Graphs of other attributes are dropped: forward computes these again
    (``weight_norm``)."""
    for name, p in model.named_parameters():
        if has_no_values(p) and p.grad is not None:
            raise ValueError(
                f"Parameter {name!r} has a gradient from a backward before it had values; materialize cannot keep "
                "this gradient. Call model.zero_grad() first."
            )
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and has_no_values(buffer) and buffer.grad_fn is not None:
                raise ValueError(
                    f"Buffer {f'{prefix}.{name}'.lstrip('.')!r} was computed from tensors that require gradients "
                    f"(its grad_fn is {buffer.grad_fn.name()}), and materialize cannot keep this graph. Compute it "
                    "under torch.no_grad(), or register its detach()."
                )


def _replay(destinations: _Destinations, where: torch.device) -> None:
    targets = destinations.by_memory
    streams = RECORDER.streams.waiting()
    positions = {stream: stream.position() for stream in streams}
    drawing = {stream: at for stream, at in positions.items() if isinstance(at, Entry)}
    others = [memory for memory in RECORDER.memories.live() if memory not in targets]
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
        stream.resume(state, drawing[stream])
    for memory in targets:
        memory.gone = "its model was materialized; take the tensor that the model has now"


# -- where values go ---------------------------------------------------------------------------------------------------


class _RealMemory:
    """The real form of one deferred memory: its parts in shards, and the tensors that view it."""

    def __init__(self) -> None:
        self.shards: list[tuple[ManagedParameter, DeferredTensor]] = []
        self.tensors: dict[torch.Tensor, View] = {}

    def deliver(self, tensor: Materialise) -> None:
        for p, source in self.shards:
            values = tensor(RECORDER.memories.view_of(source))
            if values.shape != p.cut.shape and p.cut.parallel is not None:  # this rank's part was deferred
                values = p.cut.parallel.wrap(values)
            p.take_values(values)
        for old, view in self.tensors.items():
            become(old, tensor(view))


class _Destinations:
    def __init__(self) -> None:
        self.by_memory: dict[Memory, _RealMemory] = {}
        self.real: list[Callable[[], None]] = []  #: functions that put existing values in place

    def of(self, tensor: DeferredTensor) -> _RealMemory:
        return self.by_memory.setdefault(RECORDER.memories.view_of(tensor).memory, _RealMemory())

    def add_own(self, module: nn.Module) -> None:
        """Deferred tensors that the module holds: as parameters, buffers or attributes."""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if isinstance(tensor, DeferredTensor):
                self.add(module, name, tensor, tensor)
            elif isinstance(tensor, DTensor) and isinstance(local_of(tensor), DeferredTensor):
                raise ValueError(
                    f"{name!r} of {type(module).__name__}, a DTensor of shape {tuple(tensor.shape)}, is deferred, "
                    "and belongs to no unit of fully_shard. Call fully_shard on its module, or build it outside of "
                    "deferred_init."
                )
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                for tensor in _tensors_in(value):
                    if isinstance(tensor, DeferredTensor) and not is_refused(tensor):
                        self._note(tensor, tensor)

    def add(self, module: nn.Module, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
        """Note that ``module`` holds ``old`` under ``name``, and that it gets the values of ``new``."""
        if isinstance(old, Managed):
            p = unit_of(old).managed(old)
            if isinstance(new, DeferredTensor):
                self.of(new).shards.append((p, new))
            else:
                self.real.append(lambda: p.take_values(new))
        elif isinstance(new, DeferredTensor):
            self._note(old, new)
        else:
            registry: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            self.real.append(lambda: registry.__setitem__(name, new))

    def _note(self, old: torch.Tensor, new: DeferredTensor) -> None:
        view = RECORDER.memories.view_of(new)
        self.by_memory.setdefault(view.memory, _RealMemory()).tensors.setdefault(old, view)


def _tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, set)) and id(value) not in seen:
        seen.add(id(value))  # containers may hold themselves
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(inner, seen)


def become(old: torch.Tensor, values: torch.Tensor) -> None:
    """Let the object ``old`` be the real tensor ``values``, so that all who hold it have the values."""
    new: Any = values
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(values, requires_grad=old.requires_grad)
    elif old.requires_grad and old.is_leaf:
        new = values.requires_grad_()
    new.__dict__.update({key: value for key, value in vars(old).items() if key != "_is_param"})
    share_gradient_hooks(old, new)
    exchange(old, new)
