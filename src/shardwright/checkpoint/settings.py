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
    names = {name for group in mine["param_groups"] for name in group["params"]}
    for name, values in states.items():
        if name not in mine["state"]:
            if name in names:  # another rank has its state
                continue
            raise Damaged(f"optimizer.state has {name!r:.200}, which this optimizer does not have")
        for key, value in _same(values, dict, f"optimizer.state.{name}").items():
            if key in mine["state"][name]:
                _check_kind(value, mine["state"][name][key], f"optimizer.state.{name}.{key}")
    if "param_groups" not in stored:
        return
    groups = _same(stored["param_groups"], list, "optimizer.param_groups")
    # The optimizer that has saved may have had other groups: each parameter finds its settings by its name.
    own = {key: value for group in mine["param_groups"] for key, value in group.items()}
    missing = set(names)
    for number, group in enumerate(groups):
        name = f"optimizer.param_groups[{number}]"
        for key, value in _same(group, dict, name).items():
            if not isinstance(key, str):
                raise Damaged(f"{name} has a key that is no name")
            if key != "params" and key in own:
                _check_kind(value, own[key], f"{name}.{key}")
        params = _same(group.get("params", []), list, f"{name}.params")
        if "params" not in group or not all(isinstance(each, str) for each in params):
            raise Damaged(f"{name} names no parameters")
        missing -= set(params)
    if missing:
        raise Damaged(f"optimizer.param_groups has no settings for {min(missing)}")


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
        fits = isinstance(value, (list, tuple)) and len(value) == len(own)
        if fits:
            for number, (each, mine) in enumerate(zip(value, own, strict=False)):
                _check_kind(each, mine, f"{name}[{number}]")
    else:
        fits = isinstance(value, type(own)) or not isinstance(own, (str, dict))
    if not fits:
        raise Damaged(f"{name} is {type(value).__name__}, expected {type(own).__name__}")
