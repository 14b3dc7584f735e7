"""Hooks of a sharded module's state dicts: before one is read, and before and after one is loaded.

A state dict has shards. A state dict of whole tensors can be loaded, too: a hook cuts them before torch copies them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.engine.assembly.ties import load_of
from shardwright.engine.base.precision import restore_buffers
from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.compat.storages import storage_key
from shardwright.engine.model.root import root_of
from shardwright.engine.tensors.parameter import Managed, ShardedParameter, unit_of
from shardwright.engine.tensors.ragged.tensor import RaggedTensor
from shardwright.engine.unit.owning import settle
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import complete


class _UnitHook:
    """A hook with a weak reference to its unit. A copy of the module does not get the hook."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = weakref.ref(unit) if unit is not None else lambda: None

    def __deepcopy__(self, memo: Any) -> _UnitHook:
        return type(self)(None)


class AtRest(_UnitHook):
    """Before a state dict is read, and after one was loaded: make every parameter present and sharded."""

    def __call__(self, *_: Any) -> None:
        unit = self._unit()
        if unit is not None:
            if not (
                unit.gradients.held and len(unit.watch.references) > 1
            ):  # else other modules of the unit may follow
                settle(unit)
            _show_sharded(unit)


def _show_sharded(unit: Unit) -> None:
    for each in (unit, *unit.watch.lenders):
        if not each.activity.calls:
            complete(each)
            each.weights.host_may_write()
            each.weights.show_sharded()


class AfterLoad(AtRest):
    """After a state dict was loaded. After a load of the whole model, ranks that had diverged have equal weights
    again."""

    def __call__(self, *args: Any) -> None:
        super().__call__(*args)
        unit = self._unit()
        root = root_of(unit) if unit is not None else None
        if root is not None and root.top is unit:
            root.agreement.loaded()


def as_dtensors(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put ragged parameters into a state dict as DTensors, which torch's state-dict functions gather and load.

    Buffers that were cast get the dtypes of the plain model there.
    """
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if isinstance(parameter, RaggedTensor) and isinstance(value, RaggedTensor):
            state[prefix + name] = value.as_dtensor()
    restore_buffers(module, state, prefix)


class CutToShards(_UnitHook):
    """Before a state dict is loaded: cut the whole tensors in it, before torch copies or assigns them."""

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        unit = self._unit()
        if unit is None:
            return
        _show_sharded(unit)
        load = load_of(missing) if metadata.get("assign_to_params_buffers") else None
        for name, parameter in module._parameters.items():
            key = prefix + name
            value = state.get(key)
            tied = load.again(module, name, key, value, errors) if load is not None else None
            if tied is not None:
                state[key] = tied
                continue
            owner: Unit | None = unit_of(parameter) if isinstance(parameter, Managed) else None
            p = owner.managed(parameter) if owner is not None else None
            if owner is None or p is None or not isinstance(value, torch.Tensor):
                continue
            if value.shape != p.cut.shape:
                continue
            if p.sharded in owner.without_values() and _same_memory(value, p.local):
                del state[key]  # the parameter itself, which torch inserts for missing keys
                continue
            if value is parameter:
                continue
            # A parameter that is cut in rows loads a DTensor directly.
            if not value.is_meta and not (
                isinstance(value, DTensor) and isinstance(parameter, ShardedParameter)
            ):
                state[key] = p.cut.wrap(p.cut.part_of(value).to(p.local.device))
            if load is not None and len(p.slots) > 1:
                state[key] = load.begin(p, owner.mesh, key, state[key])


def _same_memory(value: Any, local: torch.Tensor) -> bool:
    while isinstance(value, (DTensor, RaggedTensor)):
        value = local_of(value)
    return (
        type(value) is type(local) is torch.Tensor
        and storage_key(value) == storage_key(local)
        and value.storage_offset() == local.storage_offset()
    )
