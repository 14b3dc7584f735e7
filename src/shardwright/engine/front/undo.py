"""Records modules and parameters before ``fully_shard``, and restores them if the call raises an error.

It knows which attributes a call may change, but not their meaning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.engine.assembly.find import UnitParameters, own_modules
from shardwright.engine.compat.dtensor import local_of, rebind
from shardwright.engine.compat.tensors import set_class
from shardwright.engine.tensors.parameter import ManagedParameter, unit_of
from shardwright.engine.tensors.same_object import Exchanged

_LONGEST = 1000  #: longer containers belong to the user; the engine writes into none


class Undo:
    """A record from before the first change. Values that ``sync_module_states`` has broadcast are not restored."""

    def __init__(self, modules: list[nn.Module], parameters_of_units: list[UnitParameters]) -> None:
        inside = {id(m): m for top in modules for _, m in own_modules(top)}
        self._modules = [
            (m, m.__class__, dict(m.__dict__), [_contents(v) for v in m.__dict__.values()])
            for m in inside.values()
        ]
        parameters = {id(p): p for m in inside.values() for p in m._parameters.values() if p is not None}
        self._parameters: list[tuple[Any, type, dict[str, Any], Any]] = [
            (p, type(p), dict(p.__dict__), _sharded_form(p)) for p in parameters.values()
        ]
        self.exchanged: list[Exchanged] = []  #: filled while the call changes parameters
        self._lenders: list[tuple[Any, ManagedParameter, list[Any]]] = []
        for sharded in {
            id(q): q for unit_parameters in parameters_of_units for q, _ in unit_parameters.borrowed
        }.values():
            unit = unit_of(sharded)
            lent = unit.managed(sharded)
            self._lenders.append((unit, lent, list(lent.slots)))

    def __call__(self) -> None:
        for module, kind, attributes, contents in self._modules:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for value, content in zip(attributes.values(), contents, strict=True):
                if content is not None:
                    value.clear()
                    value.extend(content) if isinstance(value, list) else value.update(content)
        for exchanged in self.exchanged:
            exchanged.undo()
        for parameter, its_kind, its_attributes, form in self._parameters:
            set_class(parameter, its_kind)
            parameter.__dict__.clear()
            parameter.__dict__.update(its_attributes)
            if form is not None:
                whole, local = form
                rebind(parameter, whole)
                parameter._local_tensor = local
        for unit, lent, slots in self._lenders:
            lent.slots[:] = slots
            unit.weights.forms.index()


def _contents(value: Any) -> Any:
    if isinstance(value, (dict, list, set)) and len(value) <= _LONGEST:
        return value.copy()
    return None


@torch.no_grad()
def _sharded_form(parameter: nn.Parameter) -> tuple[Any, torch.Tensor] | None:
    """A tensor-parallel parameter may stay the same object and become a sharded one."""
    if isinstance(parameter, DTensor) and unit_of(parameter) is None:
        return parameter.detach(), local_of(parameter)
    return None
