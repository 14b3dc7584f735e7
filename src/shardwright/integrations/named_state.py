"""Checkpoints of a dict of models, optimizers and other values by name, as Lightning Fabric's ``save`` takes it.

In one file, as an unsharded run writes it, or in a folder of ``shardwright.checkpoint``, under the keys of the dict.
Either appears under its name once it is whole. ``named_loading.py`` reads both. No framework is imported here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.checkpoint import save_state, write_file
from shardwright.engine import FSDPModule, RankGroup
from shardwright.integrations.named_files import check_target
from shardwright.optim import mapped

Filter = Mapping[str, Callable[[str, Any], bool]]

KINDS = "fabric"  #: the note in an index with the kind of each key, as JSON
MODEL, OPTIMIZER, VALUE = "model", "optimizer", "value"  #: the kinds


@dataclass(frozen=True)
class StateByKind:
    """A state by kind, each by its key."""

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    others: dict[str, Any]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StateByKind:
        """Sort a state.

        Raises:
            TypeError: a module is not sharded.
            ValueError: there is no model, or an optimizer's parameters are in none.
        """
        models = {key: each for key, each in state.items() if isinstance(each, nn.Module)}
        for key, model in models.items():
            if not isinstance(model, FSDPModule):
                raise TypeError(
                    f"state[{key!r}] is a {type(model).__name__} that is not sharded, so each rank would save a "
                    "different one. Set it up first (model = fabric.setup(model)), or pass its state_dict()."
                )
        if not models:
            raise ValueError(
                f"The state has no model, only {', '.join(map(repr, state)) or 'nothing'}. Add the model that "
                "fabric.setup returned: state={'model': model, ...}."
            )
        optimizers = {key: each for key, each in state.items() if isinstance(each, Optimizer)}
        others = {key: each for key, each in state.items() if key not in models and key not in optimizers}
        parts = cls(models, optimizers, others)
        for key in optimizers:
            parts.names_of(key)
        return parts

    def names_of(self, key: str) -> list[list[str]]:
        """The names of an optimizer's parameters, by group. Those of several models have the model's key in front."""
        owners = {
            id(p): (m, name) for m, model in self.models.items() for name, p in model.named_parameters()
        }
        groups = [group["params"] for group in self.optimizers[key].param_groups]
        owners_of_groups = [[owners.get(id(p)) for p in params] for params in groups]
        several = len({each[0] for group in owners_of_groups for each in group if each is not None}) > 1
        names = []
        for group, params in zip(owners_of_groups, groups, strict=True):
            for each, p in zip(group, params, strict=True):
                if each is None:
                    raise ValueError(
                        f"state[{key!r}] is a {type(self.optimizers[key]).__name__} with a parameter of shape "
                        f"{tuple(p.shape)} that no model in the state has. Add its model to the state, and set up "
                        "model and optimizer first."
                    )
            names.append(
                [f"{each[0]}.{each[1]}" if several else each[1] for each in group if each is not None]
            )
        return names

    def kinds(self) -> dict[str, str]:
        """The kind of value of each key of the state."""
        return {
            **dict.fromkeys(self.models, MODEL),
            **dict.fromkeys(self.optimizers, OPTIMIZER),
            **dict.fromkeys(self.others, VALUE),
        }

    def values_of_others(self) -> dict[str, Any]:
        """Values to write for the other keys: the state dict of each object that has one."""
        return {k: v.state_dict() if has_state(v) else v for k, v in self.others.items()}


def agreed_parts(state: Mapping[str, Any], ranks: RankGroup) -> StateByKind:
    """A state that has the same keys on every rank. Every rank must call it.

    Raises:
        TypeError, ValueError: on every rank, as :meth:`StateByKind.of`, or because the keys differ.
    """
    sorted_parts: list[StateByKind] = []

    def sort() -> dict[str, str]:
        sorted_parts.append(StateByKind.of(state))
        return sorted_parts[0].kinds()

    def error(others: list[int], theirs: dict[str, str], first: dict[str, str]) -> Exception:
        keys = sorted(theirs.keys() | first.keys(), key=str)
        key = next(key for key in keys if theirs.get(key) != first.get(key))
        return ValueError(
            f"state[{key!r}] is {_kind_in_words(theirs, key)} on rank {others[0]} and {_kind_in_words(first, key)} on "
            "rank 0. Pass a state with the same keys on every rank."
        )

    ranks.check_equal(ranks.run_on_all(sort), error)
    return sorted_parts[0]


def _kind_in_words(kinds: Mapping[str, str], key: str) -> str:
    return {MODEL: "a model", OPTIMIZER: "an optimizer", VALUE: "a value"}.get(kinds.get(key, ""), "missing")


def has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _filtered(key: str, values: Any, filter: Filter) -> Any:
    """The entries of a dict that the filter keeps; other values have no names to filter by."""
    keep = filter.get(key)
    if keep is None or not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if keep(name, value)}


# -- saving ------------------------------------------------------------------------------------------------------------


def save_full(path: Path, state: Mapping[str, Any], filter: Filter) -> None:
    """Write one file from the first rank: whole tensors under the names and numbers of an unsharded run.

    Every rank must call it. Whole tensors come one by one, and stay on the host of the first rank.

    Raises:
        IsADirectoryError: ``path`` is a folder that is no checkpoint.
        OSError: on every rank: the file cannot be written. Anything there is unchanged.
    """
    ranks = RankGroup()
    parts = agreed_parts(state, ranks)
    keep = ranks.is_first
    ranks.run_on_first(lambda: check_target(path))
    whole: dict[str, Any] = {}
    for key, model in parts.models.items():
        whole[key] = _filtered(key, _gathered(model.state_dict(), keep), filter)
    for key, optimizer in parts.optimizers.items():
        whole[key] = _filtered(key, _gathered(optimizer.state_dict(), keep), filter)

    def write() -> None:
        others = parts.values_of_others()
        whole.update({key: _filtered(key, value, filter) for key, value in others.items()})
        write_file(path, functools.partial(torch.save, whole))

    ranks.run_on_first(write)


def save_sharded(path: Path, state: Mapping[str, Any], filter: Filter) -> None:
    """Write a folder to which every rank adds its part. Readable at any number of ranks, and in any layout.

    Every rank must call it. Values that are not sharded are the first rank's.

    Raises:
        ValueError: on every rank: a value is neither a tensor nor plain. Nothing was written.
        FileExistsError: on every rank: something else than a checkpoint is at ``path``.
        OSError: on every rank: the folder cannot be written. Anything there is unchanged.
    """
    ranks = RankGroup()
    parts = agreed_parts(state, ranks)
    contents: dict[str, Any] = {}

    def collect() -> None:
        if odd := [key for key in state if not isinstance(key, str)]:
            raise ValueError(
                f"The state has the key {odd[0]!r}; the keys of a sharded checkpoint are strings."
            )
        for key, model in parts.models.items():
            contents[key] = _filtered(key, model.state_dict(), filter)
        for key, optimizer in parts.optimizers.items():
            contents[key] = _filtered(key, _by_name(optimizer.state_dict(), parts.names_of(key)), filter)
        for key, value in parts.values_of_others().items():
            contents[key] = _filtered(key, value, filter)

    ranks.run_on_all(collect)
    if not ranks.is_first:
        contents = mapped(contents, lambda value: value if hasattr(value, "to_local") else None)
    save_state(path, contents, overwrite=True, notes={KINDS: json.dumps(parts.kinds())})


def _gathered(values: dict[str, Any], keep: bool) -> dict[str, Any]:
    """Whole tensors on the host, where they are kept. Every rank must come."""

    def gather(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.cpu() if keep else None

    return {key: mapped(value, gather) for key, value in values.items()}


def _by_name(state: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """An optimizer's state dict with names for its numbers, which depend on how it was made."""
    flat = [name for group in names for name in group]
    return {
        "state": {flat[number]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": list(group_names)}
            for group, group_names in zip(state["param_groups"], names, strict=True)
        ],
    }
