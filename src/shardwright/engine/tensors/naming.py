"""Finds the parameter of a tensor, for messages. Nothing here keeps a tensor, a parameter or a unit alive."""

from __future__ import annotations

import weakref
from typing import Any

#: Units by the id of a parameter's local tensor, and of its ragged spec. A weak reference to the parameter itself would
#: keep ``torch.utils.swap_tensors`` from it, which ``Module._apply`` calls.
_UNITS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

#: Set on a view of a sharded parameter: the local tensor whose counter increases with edits of the view.
EDITED = "_edited"
#: Set on a result of operations on sharded tensors: a weak reference to the local tensor of the first parameter.
ORIGIN = "_origin"


def remember(unit: Any, sharded: Any) -> None:
    """Register a sharded parameter of ``unit``."""
    for key in _keys(sharded):
        _UNITS[id(key)] = unit


def parameter_of(key: Any) -> str:
    """Return ``'weight' of unit 'Linear'`` for the local tensor or the ragged spec of that parameter, else nothing."""
    unit: Any = _UNITS.get(id(key))
    for p in unit.parameters if unit is not None else ():
        if any(key is each for each in _keys(p.sharded)):
            return f"{p.name!r} of unit {unit.name!r}"
    return ""


def note_origin(made: Any, source: Any) -> None:
    """Register the parameter behind the sharded tensor ``source`` as that of its result ``made``."""
    made.__dict__[ORIGIN] = _origin_of(source)


def parameter_behind(tensor: Any) -> str:
    """Return what :func:`parameter_of` says of the parameter from which a sharded tensor was viewed or computed."""
    return parameter_of(_origin_of(tensor)())


def _origin_of(tensor: Any) -> Any:
    known = tensor.__dict__.get(ORIGIN)
    return known if known is not None else weakref.ref(tensor.__dict__.get(EDITED, tensor._local_tensor))


def gathered_dtype(key: Any) -> Any:
    """Return the dtype in which modules compute with the parameter of this local tensor, or None between its uses."""
    unit: Any = _UNITS.get(id(key))
    if unit is None or not unit.weights.gathered:
        return None
    return next((p.full.dtype for p in unit.parameters if key is p.sharded._local_tensor), None)


def _keys(sharded: Any) -> list[Any]:
    spec = getattr(sharded, "spec", None)
    return [sharded._local_tensor, *([spec] if spec is not None else [])]
