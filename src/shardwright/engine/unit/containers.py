"""Containers of users with other contents: of the same class and with the same attributes. No constructor runs.

Nothing here knows units.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch


def with_items(tree: Any, items: list[Any]) -> Any:
    """A list or tuple of the class of ``tree``, with its attributes and these items."""
    cls: Any = type(tree)
    if cls is list or cls is tuple:
        return cls(items)
    if isinstance(tree, list):
        result: Any = cls.__new__(cls)
        list.extend(result, items)
    else:
        try:
            result = tuple.__new__(cls, items)
        except TypeError:  # a result of torch, such as that of torch.max
            result = cls(items)
    _copy_attributes(tree, result, dict(zip(map(id, tree), items, strict=True)))
    return result


def with_values(tree: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the class of ``tree``, with its attributes and these values.

    Raises:
        TypeError: the class allows no other values.
    """
    cls: Any = type(tree)
    if cls is dict:
        return values
    if cls is types.MappingProxyType:
        return cls(values)
    result: Any
    new_by_old = {id(tree[key]): value for key, value in values.items()}
    if isinstance(tree, dict):
        result = cls.__new__(cls)
        base: Any = OrderedDict if isinstance(tree, OrderedDict) else dict
        for key, value in values.items():
            base.__setitem__(result, key, value)  # a method of the user's class may do more
        if isinstance(tree, defaultdict):
            result.default_factory = tree.default_factory
        _copy_attributes(tree, result, new_by_old)
        return result
    if isinstance(tree, MutableMapping):
        result = tree.copy() if hasattr(tree, "copy") else copy.copy(tree)
        for key, value in values.items():
            result[key] = value
        return result
    result = copy.copy(tree)
    for name, value in vars(tree).items() if hasattr(tree, "__dict__") else ():
        if isinstance(value, Mapping):
            value = with_values(value, {k: new_by_old.get(id(v), v) for k, v in value.items()})
        object.__setattr__(result, name, new_by_old.get(id(value), value))
    if len(result) != len(values) or any(result[key] is not value for key, value in values.items()):
        raise TypeError(
            f"A {cls.__name__} with tensors must be cast for a unit, but a copy of it cannot get other values. Pass a "
            "dict or a dataclass, or use MixedPrecisionPolicy(cast_forward_inputs=False)."
        )
    return result


def _copy_attributes(old: Any, new: Any, new_by_old: dict[int, Any]) -> None:
    """Copy attributes. Some classes, such as outputs of transformers, keep their values as attributes, too."""
    attributes = dict(getattr(old, "__dict__", {}))
    for cls in type(old).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        attributes.update({name: getattr(old, name) for name in names if hasattr(old, name)})
    for name, value in attributes.items():
        object.__setattr__(new, name, new_by_old.get(id(value), value))


# -- cycles ------------------------------------------------------------------------------------------------------------


class CycleError(ValueError):
    """A container among the inputs or outputs of a unit contains itself."""


def refuse_cycle(tree: Any) -> None:
    """Raise CycleError if a container in ``tree`` contains itself."""
    names: list[str] = []  #: of the present path
    inside: dict[int, int] = {}  #: containers on the path, and the lengths of their paths
    todo: list[tuple[int, str, Any]] = [(0, "", tree)]
    while todo:
        depth, name, value = todo.pop()
        del names[depth:]
        inside = {key: length for key, length in inside.items() if length < depth}
        names.append(name)
        if id(value) in inside:
            start = inside[id(value)] + 1
            raise CycleError(
                f"A {type(value).__name__} among the inputs or outputs of a unit contains itself: "
                f"x{''.join(names[start:])} is x, with x at {''.join(names[1:start]) or 'the top'}. The engine looks "
                "for tensors in it and would never end. Break the cycle, or keep the reference in an object of another "
                "class."
            )
        inside[id(value)] = depth
        todo += [(depth + 1, name, child) for name, child in _children(value)]


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, (tuple, list)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value) if _is_container(item))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items() if _is_container(item))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
        yield from ((f".{name}", item) for name, item in fields if _is_container(item))


def _is_container(value: Any) -> bool:
    return isinstance(value, (tuple, list, Mapping)) or dataclasses.is_dataclass(value)
