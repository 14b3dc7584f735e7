"""Loads what ``named_state.py`` saves, and folders by torch and by Lightning's own strategies, into models in training.

All of a checkpoint is verified and compared with the state before any value of the state changes. Nothing is written
here, and no code of a checkpoint runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.checkpoint import (
    Damaged,
    StoredCheckpoint,
    StoredForm,
    is_checkpoint,
    nested,
    open_checkpoint,
)
from shardwright.engine import RaggedTensor, RankGroup, companion_of, unit_of
from shardwright.integrations.named_files import dict_in, other_values
from shardwright.integrations.named_state import KINDS, VALUE, StateByKind, agreed_parts, has_state
from shardwright.optim import ShardedCompanion, mapped

#: The keys of an entry in the nested state of a checkpoint.
Keys = tuple[Any, ...]


def load(path: Path, state: dict[str, Any], strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Restore ``state`` in place from a file or folder, and return the other values in it.

    Every rank must call it, and reads no more than its part of sharded tensors.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: what is there is no checkpoint, or an optimizer's parameters or state do not fit.
        KeyError: ``strict``, and a key of ``state`` is not stored.
        RuntimeError: lists all names or shapes of a model's tensors that do not fit.
    """
    ranks = RankGroup()
    parts = agreed_parts(state, ranks)

    if ranks.run_on_first(lambda: is_checkpoint(path)):
        return _load_sharded(path, parts, state, ranks, strict, weights_only)
    stored: dict[str, Any] = {}

    def examine() -> None:
        stored.update(dict_in(path, weights_only))
        _check_keys(state, stored, strict, path)
        for key in parts.optimizers.keys() & stored.keys():
            _check_optimizer(parts, key, stored[key])

    ranks.run_on_all(examine)
    for key in parts.models.keys() & stored.keys():
        parts.models[key].load_state_dict(stored.pop(key), strict=strict)
    for key in parts.optimizers.keys() & stored.keys():
        _load_optimizer(parts, key, stored.pop(key))
    _restore_others(state, parts, stored)
    return stored


def _check_keys(requested_values: Iterable[str], stored: Iterable[str], strict: bool, path: Path) -> None:
    missing = [key for key in requested_values if key not in set(stored)]
    if strict and missing:
        raise KeyError(
            f"The checkpoint {path} has no {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, stored)) or 'nothing'}. To load only the stored keys, pass strict=False."
        )


def _restore_others(state: dict[str, Any], parts: StateByKind, stored: dict[str, Any]) -> None:
    for key in parts.others.keys() & stored.keys():
        value = stored.pop(key)
        if has_state(state[key]):
            state[key].load_state_dict(value)
        else:
            state[key] = value


# -- optimizers --------------------------------------------------------------------------------------------------------


def _check_optimizer(parts: StateByKind, key: str, stored: Any) -> None:
    """Raise ValueError unless a stored state dict is of an optimizer with the same parameters in the same groups."""
    names = parts.names_of(key)
    try:
        theirs = [list(group["params"]) for group in stored["param_groups"]]
        state = dict(stored.get("state", {}))
    except (TypeError, ValueError, LookupError, AttributeError):
        raise ValueError(f"The value stored as {key!r} is not the state dict of an optimizer.") from None
    mine, sizes = [len(group) for group in names], [len(group) for group in theirs]
    if mine != sizes:
        raise ValueError(
            f"Optimizer {key!r} has groups of {mine} parameters, the stored optimizer has groups of {sizes}. Build "
            "the optimizer with the same groups as at the save."
        )
    for group, here in zip(theirs, names, strict=True):
        by_name = all(isinstance(each, str) for each in group)
        if by_name and (other := set(group) ^ set(here)):
            raise ValueError(
                f"Optimizer {key!r} was saved with other parameters in a group: {_names_in_words(sorted(other))}. "
                "Build the optimizer with the same groups as at the save."
            )
    numbers = _numbers(names, theirs)
    parameters = [p for group in parts.optimizers[key].param_groups for p in group["params"]]
    for each, values in state.items():
        if each not in numbers:
            raise ValueError(
                f"The value stored as {key!r} has the state of a parameter {each!r} that is in none of its groups."
            )
        _check_shapes(parts, key, each, parameters[numbers[each]], values)


def _check_shapes(parts: StateByKind, key: str, name: str | int, p: Tensor, values: Any) -> None:
    optimizer = parts.optimizers[key]
    if not isinstance(values, Mapping):
        raise ValueError(f"The state of parameter {name!r} that is stored as {key!r} is no dict.")
    companion = companion_of(optimizer)
    whole = companion.whole if isinstance(companion, ShardedCompanion) else ()
    if p in whole or hasattr(optimizer, "state_per_block"):
        return
    for what, value in values.items():
        shape = getattr(value, "shape", ())  # of a tensor, or of one in the checkpoint
        if shape and tuple(shape) != tuple(p.shape):
            raise ValueError(
                f"The stored {what!r} of optimizer {key!r} for parameter {name!r} has shape "
                f"{tuple(shape)}, but the parameter has shape {tuple(p.shape)}. It was saved for another "
                "model, or with parameters in another order."
            )


def _numbers(names: list[list[str]], theirs: list[list[Any]]) -> dict[str | int, int]:
    """For each parameter, as the stored state calls it, its place in the optimizer here."""
    place = {name: number for number, name in enumerate(name for group in names for name in group)}
    numbers: dict[str | int, int] = {}
    for group, here in zip(theirs, names, strict=True):
        order = group if all(isinstance(each, str) for each in group) else here
        numbers.update({each: place[name] for each, name in zip(group, order, strict=True)})
    return numbers


def _load_optimizer(parts: StateByKind, key: str, stored: dict[str, Any]) -> None:
    """Give an optimizer a state dict that fits it, with whole tensors or sharded ones."""
    optimizer, names = parts.optimizers[key], parts.names_of(key)
    numbers = _numbers(names, [group["params"] for group in stored["param_groups"]])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        numbers[each]: mapped(values, partial(_placed, p=parameters[numbers[each]]))
        for each, values in stored.get("state", {}).items()  # before its first step an optimizer has none
    }
    place = {name: number for number, name in enumerate(name for group in names for name in group)}
    groups = [
        {**group, "params": [place[name] for name in here]}
        for group, here in zip(stored["param_groups"], names, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _placed(value: Any, p: Tensor) -> Any:
    """This rank's part of a whole tensor of the parameter's shape; others as they are, in memory of their own."""
    if not isinstance(value, Tensor) or isinstance(value, (DTensor, RaggedTensor)):
        return value
    unit = unit_of(p)
    if unit is None or not value.ndim or value.shape != p.shape:
        return value.clone()
    cut = unit.managed(p).cut
    local = cut.part_of(value).to(p.device).clone(memory_format=torch.contiguous_format)
    return _shown(cut.wrap(local))


def _shown(value: Any) -> Any:
    return value.as_dtensor() if isinstance(value, RaggedTensor) else value


# -- folders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Folder:
    """A folder that every rank has found whole.

    Attributes:
        entries: all that a rank needs to know before it reads: by keys, a value or a :class:`StoredForm`.
        others: the keys of what is neither model nor optimizer.
        beside: the values of ``meta.pt``.
    """

    checkpoint: StoredCheckpoint
    entries: dict[Keys, Any]
    others: set[str]
    beside: dict[str, Any]

    @property
    def keys(self) -> set[str]:
        return {str(keys[0]) for keys in self.entries} | self.beside.keys()

    def below(self, key: str) -> dict[Keys, Any]:
        return {keys[1:]: each for keys, each in self.entries.items() if keys[0] == key}


def _opened(path: Path, parts: StateByKind, ranks: RankGroup, weights_only: bool | None) -> _Folder:
    """Verify a folder and read the values in it that are no tensors. Every rank must call it."""
    beside: dict[str, Any] = {}
    opened: list[StoredCheckpoint] = []
    entries: dict[Keys, Any] = {}

    def examine() -> None:
        opened.append(open_checkpoint(path, links=True))  # model hubs keep files behind links
        opened[0].check_lengths()
        entries.update(opened[0].entries)
        if not opened[0].has_digests:
            beside.update(other_values(path, weights_only))
            entries.update(opened[0].pickled_values({*parts.kinds()}, weights_only=weights_only is not False))

    ranks.run_on_all(examine)
    checkpoint = opened[0]
    checkpoint.verify()
    if checkpoint.has_digests:
        return _Folder(checkpoint, entries, _others_of(checkpoint.about, entries, parts), {})
    others = parts.others.keys() | beside.keys()
    return _Folder(checkpoint, entries, others - parts.models.keys() - parts.optimizers.keys(), beside)


def _others_of(about: Mapping[str, str], entries: Mapping[Keys, Any], parts: StateByKind) -> set[str]:
    """The keys of what is no model or optimizer. A checkpoint by another function than ours has no list of them."""
    keys = {str(each[0]) for each in entries}
    if KINDS in about:
        try:
            kinds = json.loads(about[KINDS])
            others = {key for key in keys if kinds[key] == VALUE}
        except (ValueError, LookupError, TypeError):
            raise Damaged("index.json does not say what the keys of the state are") from None
    else:
        others = keys - {str(each[0]) for each, value in entries.items() if isinstance(value, StoredForm)}
    return (others | (parts.others.keys() & keys)) - parts.models.keys() - parts.optimizers.keys()


def _load_sharded(
    path: Path,
    parts: StateByKind,
    state: dict[str, Any],
    ranks: RankGroup,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    try:
        folder = _opened(path, parts, ranks, weights_only)
        contents: dict[str, dict[Keys, Any]] = {}
        rooms: dict[str, Tensor] = {}
        ranks.run_on_all(lambda: contents.update(_fitted(path, folder, parts, state, strict, rooms)))
        folder.checkpoint.read(rooms)
    except Damaged as problem:
        raise ValueError(f"The checkpoint {path} cannot be read: {problem}.") from problem

    def whole(entries: Mapping[Keys, Any]) -> Any:
        return nested(
            {keys: rooms[v.name] if isinstance(v, StoredForm) else v for keys, v in entries.items()}
        )

    for key in parts.models.keys() & contents.keys():
        parts.models[key].load_state_dict(whole(contents[key]), strict=strict)
    for key in parts.optimizers.keys() & contents.keys():
        _load_optimizer(parts, key, whole(contents[key]))
    rest = {**folder.beside, **{key: whole(contents[key]) for key in folder.others & contents.keys()}}
    _restore_others(state, parts, rest)
    return rest


def _fitted(
    path: Path,
    folder: _Folder,
    parts: StateByKind,
    state: dict[str, Any],
    strict: bool,
    rooms: dict[str, Tensor],
) -> dict[str, dict[Keys, Any]]:
    """The entries to load below each key, once all of them fit the state. ``rooms`` gets the tensors to read into."""
    _check_keys(state, sorted(folder.keys), strict, path)
    contents: dict[str, dict[Keys, Any]] = {}
    for key in folder.keys - folder.beside.keys():
        if key in parts.models:
            contents[key] = _fitting(path, key, parts.models[key], folder.below(key), strict, rooms)
        elif key in parts.optimizers:
            contents[key] = folder.below(key)
            _check_optimizer(parts, key, nested(contents[key]))
            rooms.update(_rooms_for(parts, key, contents[key]))
        elif key in folder.others:
            contents[key] = folder.below(key)
            mine: Any = state.get(key)
            rooms.update(_rooms_like(mine.state_dict() if has_state(mine) else mine, contents[key]))
    return contents


def _fitting(
    path: Path,
    key: str,
    model: nn.Module,
    entries: Mapping[Keys, Any],
    strict: bool,
    rooms: dict[str, Tensor],
) -> dict[Keys, Any]:
    """The entries that the model has. ``rooms`` gets its own tensors.

    Raises:
        RuntimeError: lists all that is missing, unexpected or of another shape.
    """
    mine = model.state_dict()
    stored: dict[str, dict[Keys, Any]] = {}
    for keys, each in entries.items():
        stored.setdefault(str(keys[0]) if keys else "", {})[keys] = each
    problems = []
    if missing := [name for name in mine if name not in stored]:
        problems.append(f"missing in the checkpoint: {_names_in_words(missing)}")
    if unexpected := [name for name in stored if name not in mine]:
        problems.append(f"unexpected in the checkpoint: {_names_in_words(unexpected)}")
    if not strict:
        problems = []
    for name, value in mine.items():
        for keys, each in stored.get(name, {}).items():
            if not isinstance(value, Tensor):
                if isinstance(each, StoredForm):
                    rooms[each.name] = _room(each)
            elif isinstance(each, StoredForm) and len(keys) == 1 and each.shape == tuple(value.shape):
                rooms[each.name] = value
            else:
                shape = each.shape if isinstance(each, StoredForm) else "no tensor"
                problems.append(f"{name!r} is {tuple(value.shape)} here and {shape} in the checkpoint")
    if problems:
        raise RuntimeError(f"The checkpoint {path} does not fit state[{key!r}]: {'; '.join(problems)}.")
    return {keys: each for name in mine for keys, each in stored.get(name, {}).items()}


def _room(each: StoredForm) -> Tensor:
    """A tensor to load a stored one into, whole."""
    return torch.empty(each.shape, dtype=each.dtype)


def _names_in_words(names: list[str]) -> str:
    text = ", ".join(map(repr, names[:10]))
    return f"{text} and {len(names) - 10} more" if len(names) > 10 else text


def _stored_tensors(entries: Mapping[Keys, Any]) -> Iterator[tuple[Keys, StoredForm]]:
    for keys, each in entries.items():
        if isinstance(each, StoredForm):
            yield keys, each


def _rooms_for(parts: StateByKind, key: str, entries: Mapping[Keys, Any]) -> dict[str, Tensor]:
    """Tensors to load an optimizer's stored state into, those of a parameter's shape cut as it is."""
    optimizer = parts.optimizers[key]
    names = [name for group in parts.names_of(key) for name in group]
    parameters = dict(zip(names, (p for g in optimizer.param_groups for p in g["params"]), strict=True))
    rooms: dict[str, Tensor] = {}
    for keys, each in _stored_tensors(entries):
        p = parameters.get(str(keys[1])) if keys[0] == "state" and len(keys) > 1 else None
        unit = unit_of(p) if p is not None else None
        if p is not None and unit is not None and each.shape and each.shape == tuple(p.shape):
            managed = unit.managed(p)
            rooms[each.name] = _shown(managed.cut.wrap(torch.empty_like(managed.local, dtype=each.dtype)))
        else:
            rooms[each.name] = _room(each)
    return rooms


def _rooms_like(example: Any, entries: Mapping[Keys, Any]) -> dict[str, Tensor]:
    """Tensors to load other values into: new ones, cut as in ``example`` where that has a DTensor, else on the host."""
    rooms: dict[str, Tensor] = {}
    for keys, each in _stored_tensors(entries):
        value = example
        for step in keys:
            try:
                value = value[step[0] if isinstance(step, tuple) else step]
            except (LookupError, TypeError):
                value = None
        like = isinstance(value, DTensor) and tuple(value.shape) == each.shape and value.dtype == each.dtype
        rooms[each.name] = value.detach().clone() if like else _room(each)
    return rooms
