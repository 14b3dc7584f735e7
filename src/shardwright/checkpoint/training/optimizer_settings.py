"""Checks of an optimizer's stored values before an optimizer gets them: its groups, settings and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardwright.common.errors import Damaged


def check_states(stored: Any, mine: Mapping[str, Any]) -> None:
    """Compare the stored states of parameters with those of the optimizer that gets them.

    Args:
        stored: values and tensors by the parameter's name and their key.
        mine: ``state`` of the same form, and ``param_groups``.

    Raises:
        Damaged: they are of another kind, or of no parameter of the optimizer.
    """
    names = {name for group in mine["param_groups"] for name in group["params"]}
    for name, values in _same(stored, dict, "optimizer.state").items():
        if name not in mine["state"]:
            if name in names:  # another rank has its state
                continue
            raise Damaged(f"optimizer.state has {name!r:.200}, which this optimizer does not have")
        for key, value in _same(values, dict, f"optimizer.state.{name}").items():
            if key in mine["state"][name]:
                _check_kind(value, mine["state"][name][key], f"optimizer.state.{name}.{key}")


def check_settings(stored: Mapping[Any, Any], mine: Mapping[str, Any], name: str) -> None:
    """Compare the stored settings of a group of parameters with those of the group that gets them.

    Raises:
        Damaged: they are of another kind. The message has ``name``.
    """
    for key, value in stored.items():
        if not isinstance(key, str):
            raise Damaged(f"{name} has a key that is no name")
        if key != "params" and key in mine:
            _check_kind(value, mine[key], f"{name}.{key}")


def _same(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise Damaged(f"expected {name} as {kind.__name__}, found {type(value).__name__}")
    return value


def _check_kind(value: Any, own: Any, name: str) -> None:
    """Numbers may stand for one another, and anything for nothing."""
    if own is None or value is None or isinstance(own, Tensor):
        fits = isinstance(value, (bool, int, float, str, Tensor)) or value is None or own is None
    elif isinstance(own, (bool, int, float)):
        fits = isinstance(value, (bool, int, float, Tensor))
    elif isinstance(own, list):  # such as the names of a group's parameters
        fits = isinstance(value, (list, tuple))
    elif isinstance(own, tuple):
        fits = isinstance(value, (list, tuple)) and len(value) == len(own)
        if fits:
            for number, (each, mine) in enumerate(zip(value, own, strict=False)):
                _check_kind(each, mine, f"{name}[{number}]")
    else:
        fits = isinstance(value, type(own)) or not isinstance(own, (str, dict))
    if not fits:
        raise Damaged(f"{name} is {type(value).__name__}, expected {type(own).__name__}")
