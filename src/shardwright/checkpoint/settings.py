"""Checks of an optimizer's stored values before an optimizer gets them: its groups, settings and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardwright.checkpoint.digests import Damaged


def check_settings(stored: Any, mine: Mapping[str, Any]) -> None:
    """Compare the stored values of an optimizer with those of the one that gets them.

    Raises:
        Damaged: they are of another kind.
    """
    _same(stored, dict, "optimizer")
    states = _same(stored.get("state", {}), dict, "optimizer.state")
    for name, values in states.items():
        if name not in mine["state"]:
            raise Damaged(f"optimizer.state has {name!r:.200}, which this optimizer does not have")
        for key, value in _same(values, dict, f"optimizer.state.{name}").items():
            if key in mine["state"][name]:
                _check_kind(value, mine["state"][name][key], f"optimizer.state.{name}.{key}")
    if "param_groups" not in stored:
        return
    groups = _same(stored["param_groups"], list, "optimizer.param_groups")
    if len(groups) != len(mine["param_groups"]):
        raise Damaged(f"optimizer has {len(groups)} groups, expected {len(mine['param_groups'])}")
    for number, (group, own) in enumerate(zip(groups, mine["param_groups"], strict=True)):
        name = f"optimizer.param_groups[{number}]"
        for key, value in _same(group, dict, name).items():
            if not isinstance(key, str):
                raise Damaged(f"{name} has a key that is no name")
            if key in own:
                _check_kind(value, own[key], f"{name}.{key}")
        if sorted(group.get("params", own["params"])) != sorted(own["params"]):
            raise Damaged(f"{name} has other parameters than this optimizer's")


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
    elif isinstance(own, (list, tuple)):
        fits = isinstance(value, (list, tuple)) and (name.endswith(".params") or len(value) == len(own))
        if fits:
            for number, (each, mine) in enumerate(zip(value, own, strict=False)):
                _check_kind(each, mine, f"{name}[{number}]")
    else:
        fits = isinstance(value, type(own)) or not isinstance(own, (str, dict))
    if not fits:
        raise Damaged(f"{name} is {type(value).__name__}, expected {type(own).__name__}")
