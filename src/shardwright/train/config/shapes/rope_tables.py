"""The rotary table of a config.json, which has two places for it.

Up to version 4 transformers wrote `rope_theta` and `rope_scaling`, since then `rope_parameters`. If both are there,
versions of transformers and other programs choose differently. So two tables that differ are an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OLD, NEW = "rope_scaling", "rope_parameters"
_SHARED = ("rope_theta", "partial_rotary_factor")
"""Keys beside the tables that count for a table without them."""
_STRETCHED = ("llama3", "yarn", "longrope")
"""Types with a length of pre-training."""
_LENGTH = "original_max_position_embeddings"
Table = dict[str, Any]


def rope_tables(config: Mapping[str, Any]) -> dict[str, Table]:
    """Return the rotary table of each type of layers, or one of all layers under the name "". Empty: config.json has
    none.

    A table has `rope_type` and the keys that config.json gives, those beside the tables, too.

    Raises:
        ValueError: two places differ. The message begins with the first one.
    """
    old, new = _tables(config, OLD), _tables(config, NEW)
    if old and new and old != new:
        layers = next((each for each in (*old, *new) if old.get(each) != new.get(each)), "")
        difference = _difference(old.get(layers), new.get(layers))
        where = f" of {layers}" if layers else ""
        raise ValueError(
            f"{OLD}: expected the same rotary table{where} as in {NEW}, found {difference}; remove the wrong one of "
            f"the two, since programs choose differently (rope_theta belongs to {OLD})"
        )
    found_tables = old or new
    for key in _SHARED:
        value, stated = config.get(key), [table[key] for table in found_tables.values() if key in table]
        if value is not None and stated and value not in stated:
            raise ValueError(
                f"{key}: expected {' or '.join(map(str, stated))}, the value in {OLD if old else NEW}, found {value}; "
                "remove the wrong one of the two, since programs choose differently"
            )
    if not found_tables and config.get("rope_theta") is not None:
        return {"": _filled({}, config)}
    return found_tables


def one_place(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same config.json with the rotary table in one place, if it has two."""
    if not _tables(config, NEW):
        return dict(config)
    if config.get(OLD):
        without = {NEW}
    else:
        new = config[NEW]
        tables = [table for table in new.values() if isinstance(table, Mapping)] or [new]
        without = {OLD, "rope_theta"} if all("rope_theta" in table for table in tables) else {OLD}
    return {key: value for key, value in config.items() if key not in without}


def _tables(config: Mapping[str, Any], key: str) -> dict[str, Table]:
    content = config.get(key)
    if not isinstance(content, Mapping) or not content:
        return {}
    nested = {name: table for name, table in content.items() if isinstance(table, Mapping)}
    if nested:
        return {name: _filled(table, config) for name, table in nested.items()}
    return {"": _filled(content, config)}


def _filled(table: Mapping[str, Any], config: Mapping[str, Any]) -> Table:
    """Return a table with the keys beside it that count for it."""
    result = {key: value for key, value in table.items() if value is not None and key != "type"}
    kind = table.get("rope_type", table.get("type", "default"))
    if table.get("type", kind) != kind:
        raise ValueError(f"rope_type: expected one type, found {kind!r} and {table['type']!r} in one table")
    result["rope_type"] = kind
    for key in _SHARED:
        if config.get(key) is not None:
            result.setdefault(key, config[key])
    if kind in _STRETCHED:
        beside = config.get(_LENGTH)
        if beside is not None and result.get(_LENGTH, beside) != beside:
            raise ValueError(
                f"{_LENGTH}: expected {beside}, the value beside the table, found {result[_LENGTH]} in it; remove the "
                "wrong one of the two"
            )
        result.setdefault(_LENGTH, config.get("max_position_embeddings") if beside is None else beside)
    return result


def _difference(old: Table | None, new: Table | None) -> str:
    if old is None or new is None:
        return "it in one of the two alone"
    key = next(key for key in (*old, *new) if old.get(key) != new.get(key))
    return f"{key} = {old.get(key, 'nothing')!r} there and {new.get(key, 'nothing')!r} here"
