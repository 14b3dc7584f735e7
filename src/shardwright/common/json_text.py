"""JSON as this package writes it, into files and for other programs: every reader of JSON takes it.

Only the standard library is imported here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_json(value: Any, indent: int | None = None, compact: bool = False) -> str:
    """Return the value as JSON. A float that is nan or infinite becomes null, since JSON has no word for it.

    ``compact``: without spaces between values.
    """
    separators = (",", ":") if compact else None
    return json.dumps(_with_nulls(value), allow_nan=False, indent=indent, separators=separators)


def _with_nulls(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _with_nulls(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(each) for each in value]
    return value


def not_finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that are nan or infinite, as text, by their names: "nan", "inf" or "-inf".

    Objects are nested.
    """
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            if inner := not_finite(value):
                found[name] = inner
        elif isinstance(value, float) and not math.isfinite(value):
            found[name] = str(float(value))
    return found
