"""Checkpoints of a dict of models, optimizers and other values by name, as Lightning Fabric's ``save`` takes it.

In one file, as an unsharded run writes it, or in a folder of torch's distributed checkpoint, with ``meta.pt`` for what
is neither model nor optimizer and ``checksums.json`` for the digests of its files. Either appears under its name once
it is whole. Loading runs no code of a checkpoint. No framework is imported here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.checkpoint import folders
from shardwright.checkpoint.digests import Damaged, Digest
from shardwright.checkpoint.model import first_rank, on_every_rank
from shardwright.engine import FSDPModule
from shardwright.engine.assembly.states import everywhere
from shardwright.engine.base.companion import companion_of
from shardwright.engine.tensors.parameter import unit_of
from shardwright.engine.tensors.ragged import RaggedTensor
from shardwright.integrations.named_files import (
    beside,
    check_target,
    complete,
    damaged,
    dict_in,
    is_sharded,
    own_digests,
    put_in_place,
    read_others,
    verified,
    write_values,
)
from shardwright.optim.companion import ShardedCompanion
from shardwright.optim.whole_state import mapped

Filter = Mapping[str, Callable[[str, Any], bool]]


@dataclass(frozen=True)
class Parts:
    """A state by kind, each by its key."""

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    others: dict[str, Any]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Parts:
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

    def values_of_others(self) -> dict[str, Any]:
        """What to write of them: the state dict of those that have one."""
        return {k: v.state_dict() if _has_state(v) else v for k, v in self.others.items()}


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _filtered(key: str, values: dict[str, Any], filter: Filter) -> dict[str, Any]:
    keep = filter.get(key)
    return values if keep is None else {name: value for name, value in values.items() if keep(name, value)}


# -- saving ------------------------------------------------------------------------------------------------------------


def save_full(path: Path, state: Mapping[str, Any], mesh: DeviceMesh, filter: Filter) -> None:
    """Write one file from the first rank: whole tensors under the names and numbers of an unsharded run.

    Every rank must call it. Whole tensors come one by one, and stay on the host of the first rank.

    Raises:
        IsADirectoryError: ``path`` is a folder that is no checkpoint.
        OSError: the file cannot be written; other ranks raise RuntimeError. What was there before is left as it was.
    """
    parts = Parts.of(state)
    keep = first_rank(mesh)
    on_every_rank(mesh, lambda: check_target(path, folder=False) if keep else None)
    whole: dict[str, Any] = {}
    for key, model in parts.models.items():
        whole[key] = _filtered(key, _gathered(model.state_dict(), keep), filter)
    for key, optimizer in parts.optimizers.items():
        whole[key] = _filtered(key, _gathered(optimizer.state_dict(), keep), filter)
    whole.update(
        {k: _filtered(k, v, filter) if k in filter else v for k, v in parts.values_of_others().items()}
    )

    def write() -> None:
        partial = beside(path, "partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_values(whole, partial)
            put_in_place(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    on_every_rank(mesh, write if keep else lambda: None)


def save_sharded(path: Path, state: Mapping[str, Any], mesh: DeviceMesh, filter: Filter) -> None:
    """Write a folder to which every rank adds its part. Readable at any number of ranks, and in any layout.

    Raises:
        FileExistsError: ``path`` is a folder with something else than a checkpoint in it.
        OSError: the folder cannot be written, on this rank or another (then RuntimeError). What was there before is
            left as it was.
    """
    parts = Parts.of(state)
    first = first_rank(mesh)
    stored: dict[str, Any] = {}
    for key, model in parts.models.items():
        stored[key] = _filtered(key, model.state_dict(), filter)
    for key, optimizer in parts.optimizers.items():
        stored[key] = _filtered(key, _by_name(optimizer.state_dict(), parts.names_of(key)), filter)
    others = {k: _filtered(k, v, filter) if k in filter else v for k, v in parts.values_of_others().items()}
    partial = beside(path, "partial")

    def make_room() -> None:
        check_target(path, folder=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish() -> None:
        complete(partial, others, digests)
        put_in_place(partial, path)

    on_every_rank(mesh, make_room if first else lambda: None)
    try:
        try:
            dcp.save(stored, storage_writer=dcp.FileSystemWriter(partial))
        except CheckpointException as error:
            raise OSError(f"The checkpoint {path} could not be written: {error}") from error
        digests: dict[str, Digest] = {}
        for part in everywhere(mesh, on_every_rank(mesh, lambda: own_digests(partial))):
            digests.update(part)
        on_every_rank(mesh, finish if first else lambda: None)
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


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


# -- loading -----------------------------------------------------------------------------------------------------------


def load(
    path: Path, state: dict[str, Any], mesh: DeviceMesh, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Restore ``state`` in place from what either function above has saved, and return what it did not ask for.

    Every rank must call it, and reads no more than its part of sharded tensors.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: what is there is no checkpoint, or an optimizer's parameters or state do not fit.
        KeyError: ``strict``, and a key of ``state`` is not stored.
        RuntimeError: lists all names or shapes of a model's tensors that do not fit.
    """
    parts = Parts.of(state)
    if is_sharded(path):
        return _load_sharded(path, parts, state, mesh, strict, weights_only)
    stored = on_every_rank(mesh, lambda: dict_in(path, weights_only))
    _check_keys(state, stored, strict, path)
    for key in parts.models.keys() & stored.keys():
        parts.models[key].load_state_dict(stored.pop(key), strict=strict)
    for key in parts.optimizers.keys() & stored.keys():
        _load_optimizer(parts, key, stored.pop(key))
    _restore_others(state, parts, stored)
    return stored


def _check_keys(requested_values: Iterable[str], stored: Mapping[str, Any], strict: bool, path: Path) -> None:
    missing = [key for key in requested_values if key not in stored]
    if strict and missing:
        raise KeyError(
            f"The checkpoint {path} has no {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, stored)) or 'nothing'}. To load only the stored keys, pass strict=False."
        )


def _restore_others(state: dict[str, Any], parts: Parts, stored: dict[str, Any]) -> None:
    for key in parts.others.keys() & stored.keys():
        value = stored.pop(key)
        if _has_state(state[key]):
            state[key].load_state_dict(value)
        else:
            state[key] = value


def _load_optimizer(parts: Parts, key: str, stored: Any) -> None:
    """Give an optimizer a stored state dict, under names or under numbers, with whole tensors or sharded ones."""
    optimizer, names = parts.optimizers[key], parts.names_of(key)
    if not isinstance(stored, dict) or "param_groups" not in stored:
        raise ValueError(f"The value stored as {key!r} is not the state dict of an optimizer.")
    mine, theirs = [len(group) for group in names], [len(g["params"]) for g in stored["param_groups"]]
    if mine != theirs:
        raise ValueError(
            f"Optimizer {key!r} has groups of {mine} parameters, the stored optimizer has groups of {theirs}. Build "
            "the optimizer with the same groups as at the save."
        )
    place = {name: i for i, name in enumerate(name for group in names for name in group)}
    number: dict[str | int, int] = {}  #: what the parameter is called in the stored state -> its place here
    for group, here in zip(stored["param_groups"], names, strict=True):
        by_name = all(isinstance(each, str) for each in group["params"])
        if by_name and (other := set(group["params"]) ^ set(here)):
            raise ValueError(
                f"Optimizer {key!r} was saved with other parameters in a group: {_names_in_words(sorted(other))}. "
                "Build the optimizer with the same groups as at the save."
            )
        order = group["params"] if by_name else here
        number.update({each: place[name] for each, name in zip(group["params"], order, strict=True)})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    companion = companion_of(optimizer)
    whole = companion.whole if isinstance(companion, ShardedCompanion) else ()
    state = {}
    for each, values in stored.get("state", {}).items():  # before its first step an optimizer has none
        p = parameters[number[each]]
        state[number[each]] = mapped(values, partial(_placed, p=p))
        if p in whole or hasattr(optimizer, "state_per_block"):
            continue
        for what, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != p.shape:
                raise ValueError(
                    f"The stored {what!r} of optimizer {key!r} for parameter {each!r} has shape "
                    f"{tuple(value.shape)}, but the parameter has shape {tuple(p.shape)}. It was saved for another "
                    "model, or with parameters in another order."
                )
    groups = [
        {**group, "params": [place[name] for name in here]}
        for group, here in zip(stored["param_groups"], names, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _placed(value: Any, p: torch.Tensor) -> Any:
    """This rank's part of a whole tensor of the parameter's shape; others as they are, in memory of their own."""
    if not isinstance(value, torch.Tensor) or isinstance(value, (DTensor, RaggedTensor)):
        return value
    unit = unit_of(p)
    if unit is None or not value.ndim or value.shape != p.shape:
        return value.clone()
    cut = unit.managed(p).cut
    local = cut.part_of(value).to(p.device).clone(memory_format=torch.contiguous_format)
    return _shown(cut.wrap(local))


def _shown(value: Any) -> Any:
    return value.as_dtensor() if isinstance(value, RaggedTensor) else value


class _Stored(NamedTuple):
    """A tensor or other value of a folder."""

    key: str
    path: tuple[str | int, ...]
    metadata: Any

    @property
    def shape(self) -> torch.Size | None:
        """None of what is no tensor."""
        return self.metadata.size if isinstance(self.metadata, TensorStorageMetadata) else None

    @property
    def dtype(self) -> torch.dtype:
        return self.metadata.properties.dtype  # type: ignore[no-any-return]

    def room(self) -> torch.Tensor | None:
        """What to load it into, whole; None is replaced by any other value."""
        return None if self.shape is None else torch.empty(self.shape, dtype=self.dtype)


def _load_sharded(
    path: Path, parts: Parts, state: dict[str, Any], mesh: DeviceMesh, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    metadata = on_every_rank(mesh, lambda: verified(path, mesh))
    others = on_every_rank(mesh, lambda: read_others(path, weights_only))
    entries = _entries_of(metadata)
    _check_keys(state, {**entries, **others}, strict, path)
    requested_values: dict[str, Any] = {}
    models: dict[str, dict[str, list[tuple[_Stored, Any]]]] = {}
    for key, model in parts.models.items():
        if key in entries:
            models[key] = _fitting(path, key, model, entries[key], strict)
            requested_values.update(
                {each.key: room for pairs in models[key].values() for each, room in pairs}
            )
    for key in parts.optimizers:
        requested_values.update(_room_for(parts, key, entries.get(key, ())))
    try:
        folders.load(path, requested_values, metadata, weights_only=weights_only is not False)
    except Damaged as problem:
        raise damaged(path, problem) from problem
    for key, values in models.items():
        loaded = {
            name: _nested({each.path[1:]: requested_values[each.key] for each, _ in pairs})
            for name, pairs in values.items()
        }
        parts.models[key].load_state_dict(loaded, strict=strict)
    for key in parts.optimizers.keys() & entries.keys():
        _load_optimizer(parts, key, _nested({each.path: requested_values[each.key] for each in entries[key]}))
    _restore_others(state, parts, others)
    return others


def _entries_of(metadata: Metadata) -> dict[str, list[_Stored]]:
    """What a folder holds, by the key of the state."""
    places = metadata.planner_data or {}
    entries: dict[str, list[_Stored]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        first, *rest = places.get(key, (key,))
        entries.setdefault(str(first), []).append(_Stored(key, tuple(rest), entry))
    return entries


def _fitting(
    path: Path, key: str, model: nn.Module, entries: list[_Stored], strict: bool
) -> dict[str, list[tuple[_Stored, Any]]]:
    """What is stored of each entry of the model's state dict, with what to load it into: its own tensor."""
    mine = model.state_dict()
    stored: dict[str, list[_Stored]] = {}
    for each in entries:
        stored.setdefault(str(each.path[0]), []).append(each)
    problems = []
    if missing := [name for name in mine if name not in stored]:
        problems.append(f"missing in the checkpoint: {_names_in_words(missing)}")
    if unexpected := [name for name in stored if name not in mine]:
        problems.append(f"unexpected in the checkpoint: {_names_in_words(unexpected)}")
    if not strict:
        problems = []
    for name, value in mine.items():
        if isinstance(value, torch.Tensor) and name in stored:
            shape = stored[name][0].shape if len(stored[name]) == 1 else None
            if shape != value.shape:
                stored_shape = "no tensor" if shape is None else tuple(shape)
                problems.append(f"{name!r} is {tuple(value.shape)} here and {stored_shape} in the checkpoint")
    if problems:
        raise RuntimeError(f"The checkpoint {path} does not fit state[{key!r}]: {'; '.join(problems)}.")
    return {
        name: [(each, value if isinstance(value, torch.Tensor) else each.room()) for each in stored[name]]
        for name, value in mine.items()
        if name in stored
    }


def _names_in_words(names: list[str]) -> str:
    text = ", ".join(map(repr, names[:10]))
    return f"{text} and {len(names) - 10} more" if len(names) > 10 else text


def _room_for(parts: Parts, key: str, entries: Iterable[_Stored]) -> dict[str, Any]:
    """Tensors to load an optimizer's stored state into, those of a parameter's shape cut as it is."""
    optimizer = parts.optimizers[key]
    flat = [name for group in parts.names_of(key) for name in group]
    parameters = dict(zip(flat, (p for g in optimizer.param_groups for p in g["params"]), strict=True))
    room: dict[str, Any] = {}
    for each in entries:
        p = parameters.get(str(each.path[1])) if each.path[0] == "state" and len(each.path) > 1 else None
        unit = unit_of(p) if p is not None else None
        if p is not None and unit is not None and each.shape and each.shape == p.shape:
            managed = unit.managed(p)
            room[each.key] = _shown(managed.cut.wrap(torch.empty_like(managed.local, dtype=each.dtype)))
        else:
            room[each.key] = each.room()
    return room


def _nested(values: dict[tuple[str | int, ...], Any]) -> Any:
    """Dicts and lists again, from the paths to what they hold."""
    if () in values:
        return values[()]
    inner: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for path, value in values.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    if all(isinstance(step, int) for step in inner):
        return [_nested(inner[step]) for step in sorted(inner)]
    return {step: _nested(each) for step, each in inner.items()}
