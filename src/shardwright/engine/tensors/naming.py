"""Finds the parameter of a tensor, for messages. Nothing here keeps a tensor, a parameter or a unit alive."""

from __future__ import annotations

import weakref
from typing import Any

#: Units by the id of a parameter's local tensor, and of its ragged spec. A weak reference to the parameter itself would
#: keep ``torch.utils.swap_tensors`` from it, which ``Module._apply`` calls.
_UNITS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def remember(unit: Any, sharded: Any) -> None:
    """Register a sharded parameter of ``unit``."""
    for key in _keys(sharded):
        _UNITS[id(key)] = unit


def parameter_of(key: Any) -> str:
    """``'weight' of unit 'Linear'``, of the parameter with this local tensor or this ragged spec; or nothing."""
    unit: Any = _UNITS.get(id(key))
    for p in unit.parameters if unit is not None else ():
        if any(key is each for each in _keys(p.sharded)):
            return f"{p.name!r} of unit {unit.name!r}"
    return ""


def _keys(sharded: Any) -> list[Any]:
    spec = getattr(sharded, "spec", None)
    return [sharded._local_tensor, *([spec] if spec is not None else [])]
