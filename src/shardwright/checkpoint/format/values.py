"""Values of a checkpoint that are no tensors, as JSON: plain ones as they are, others in a marked form.

Plain: None, bool, int, float, str, and lists and dicts of them. Marked: tuples, dicts with keys that are not strings,
``Counter``, ``OrderedDict``, floats that are no numbers, ``torch.dtype``, ``torch.Size``, ``torch.device``, bytes.
Nothing else can be stored, and nothing that is read is called. The checks of single values in descriptions are here,
too.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from shardwright.common.errors import Damaged

#: Every dtype by its whole name, such as ``torch.float32``.
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def typed(value: Any, kind: type, what: str) -> Any:
    """Return the value if it is of exactly this type. Raises Damaged otherwise."""
    if type(value) is not kind:
        raise Damaged(f"expected {what} as {kind.__name__}, found {type(value).__name__}")
    return value


def count_of(value: Any, what: str) -> int:
    """Return the value if it can be a number of bytes or elements. Raises Damaged otherwise."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Damaged(f"expected {what} as an integer >= 0 and below 2**63, found {type(value).__name__}")
    return value


DEEPEST = 100  #: values, or keys, inside one another
_MOST_BITS = 14_000  #: of an integer: Python reads at most 4,300 digits of one
_MARK = "!"  #: the first key of a marked form


def encoded(value: Any, name: str, depth: int = 0) -> Any:
    """Return the value in JSON's types.

    Raises:
        ValueError: a value is neither plain nor marked, or too deep; the message names it.
    """
    if depth > DEEPEST:
        raise ValueError(f"{name[:200]} is more than {DEEPEST} values deep, which a checkpoint cannot hold")
    depth += 1
    kind = type(value)
    if isinstance(value, int) and int(value).bit_length() > _MOST_BITS:
        raise ValueError(
            f"{name} is an integer of {int(value).bit_length():,} bits; a checkpoint holds at most {_MOST_BITS:,}. "
            "Pass it as a string, such as hex(value)"
        )
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_MARK: "float", "is": repr(float(value))}
    for plain in (int, str):  # subclasses, such as numbers of enumerations
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, torch.Size):
        return {_MARK: "Size", "is": list(value)}
    if isinstance(value, (list, tuple)):
        items = [encoded(each, f"{name}[{number}]", depth) for number, each in enumerate(value)]
        return {_MARK: "tuple", "is": items} if isinstance(value, tuple) else items
    if kind in (torch.dtype, torch.device):
        return {_MARK: kind.__name__, "is": str(value)}
    if kind is bytes:
        return {_MARK: "bytes", "is": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if kind is dict and all(type(key) is str for key in value) and _MARK not in value:
            return {key: encoded(each, f"{name}.{key}", depth) for key, each in value.items()}
        pairs = [
            [encoded(k, f"{name}.{k}", depth), encoded(each, f"{name}.{k}", depth)]
            for k, each in value.items()
        ]
        return {_MARK: kind.__name__ if kind in (Counter, OrderedDict) else "dict", "is": pairs}
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        raise ValueError(
            f"{name} is a {kind.__module__}.{kind.__qualname__} inside another value. Pass an object with state_dict "
            "directly in extra, under a key of its own, or pass its state_dict()"
        )
    raise ValueError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}. A checkpoint holds tensors and plain values (numbers, "
        "strings, lists, tuples, dicts), because nothing that it holds may run as code. Pass the value as one of "
        "these, or an object with state_dict and load_state_dict."
    )


def decoded(value: Any, depth: int = 0) -> Any:
    """Return the value from which :func:`encoded` has made this one.

    Raises:
        Damaged: the value has a mark that no save writes, or is too deep.
    """
    if depth > DEEPEST:
        raise Damaged(f"expected a value at most {DEEPEST} values deep")
    depth += 1
    if isinstance(value, list):
        return [decoded(each, depth) for each in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: decoded(each, depth) for key, each in value.items()}
    mark, content = value[_MARK], value.get("is")
    try:
        if len(value) == 2 and mark in _DECODERS:
            return _DECODERS[mark](content, depth)
    except Damaged:
        raise
    except (TypeError, ValueError, LookupError, RuntimeError):
        pass
    raise Damaged(f"expected a value that a save can write, found one marked {str(mark)[:40]!r}")


def _float(content: Any, depth: int) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]


def _items(content: Any, depth: int) -> list[Any]:
    if type(content) is not list:
        raise TypeError
    return [decoded(each, depth) for each in content]


def _size(content: Any, depth: int) -> torch.Size:
    if any(type(each) is not int or not 0 <= each < 1 << 63 for each in _items(content, depth)):
        raise TypeError
    return torch.Size(content)


def _pairs(content: Any, depth: int) -> list[Any]:
    return _items(content, depth - 1)  # a pair is no value of its own


_DECODERS: dict[str, Any] = {
    "float": _float,
    "tuple": lambda content, depth: tuple(_items(content, depth)),
    "Size": _size,
    "dtype": lambda content, depth: DTYPES[content],
    "device": lambda content, depth: torch.device(content),
    "bytes": lambda content, depth: base64.b64decode(content, validate=True),
    "dict": lambda content, depth: dict(_pairs(content, depth)),
    "Counter": lambda content, depth: Counter(dict(_pairs(content, depth))),
    "OrderedDict": lambda content, depth: OrderedDict(_pairs(content, depth)),
}
