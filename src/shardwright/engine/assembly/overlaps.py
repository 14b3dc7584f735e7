"""Finds tensors that share memory with parameters about to be sharded, which get memory of their own then.

Parameters and buffers that would part this way are refused. Other tensors, such as views in attributes of modules, are
returned, so that uses of them can be refused: some, as of ``torch.nn.utils.spectral_norm``, are made again before any
use. Memory that is held outside of modules, such as that of a kept state dict, cannot be told from a copy on purpose.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.engine.assembly.find import UnitParameters
from shardwright.engine.compat.storages import storage_key, storage_use_count
from shardwright.engine.tensors.parameter import Managed, plain_of
from shardwright.engine.tensors.same_object import is_refused

_LONGEST = 1000  #: longer containers are data


class Sharer(NamedTuple):
    """A tensor in an attribute of a module that shares memory with a parameter, and both names."""

    tensor: torch.Tensor
    name: str
    parameter: str


class _Held(NamedTuple):
    name: str
    tensor: torch.Tensor
    registered: bool  #: whether it is a parameter or a buffer


def sharers_of(modules: list[nn.Module], parameters_of_units: list[UnitParameters]) -> list[Sharer]:
    """Return the tensors in attributes of modules that share memory with a parameter that is about to be sharded.

    Raises:
        ValueError: another parameter or a buffer shares its memory. Names both.
    """
    by_storage: dict[int, list[_Held]] = {}
    own: dict[int, str] = {}
    for owned in (each for unit_parameters in parameters_of_units for each in unit_parameters.owned):
        own[id(owned.parameter)] = owned.name
        if not isinstance(owned.parameter, Managed) and (key := _storage(owned.parameter)) is not None:
            by_storage.setdefault(key, []).append(_Held(owned.name, owned.parameter, True))
    here = [
        held
        for position, top in enumerate(modules)
        for prefix, module in top.named_modules(prefix=f"{position}" if len(modules) > 1 else "")
        for held in _held_by(module, prefix + "." if prefix else "")
    ]
    known: dict[int, set[int]] = {}
    for held in here:
        if (key := _storage(held.tensor)) in by_storage:
            known.setdefault(key, set()).add(id(held.tensor))  # type: ignore[arg-type]
    sharers = list(_sharers(by_storage, here, own))
    hidden = {key for key, tensors in by_storage.items() if _users(tensors[0].tensor) > len(known[key])}
    if hidden:
        rest = {key: tensors for key, tensors in by_storage.items() if key in hidden}
        inside = {id(m) for top in modules for m in top.modules()}
        try:
            sharers += _sharers(rest, _held_outside(inside), own)
        except ValueError:
            gc.collect()  # the module may be garbage
            sharers += _sharers(rest, _held_outside(inside), own)
    return sharers


def _sharers(
    by_storage: dict[int, list[_Held]], held: Iterable[_Held], own: dict[int, str]
) -> Iterator[Sharer]:
    for each in held:
        for parameter in by_storage.get(_storage(each.tensor), ()):  # type: ignore[arg-type]
            if parameter.tensor is each.tensor or not _overlap(
                plain_of(parameter.tensor), plain_of(each.tensor)
            ):
                continue
            if each.registered:
                raise ValueError(
                    f"parameter {parameter.name!r} of shape {tuple(parameter.tensor.shape)} and "
                    f"{own.get(id(each.tensor), each.name)!r} of shape {tuple(each.tensor.shape)} share memory (as "
                    "after `a.data = b.data`, or load_state_dict(assign=True) of tied values). Sharded, each would get "
                    "memory of its own, and they would no longer change together. To tie them, put one parameter "
                    "object under both names before fully_shard (`a.weight = b.weight`). Else give one of them a copy "
                    "(`a.data = a.data.clone()`)."
                )
            yield Sharer(each.tensor, each.name, parameter.name)


def _held_outside(inside: set[int]) -> Iterator[_Held]:
    """Tensors of all modules of this process that are not ``inside``."""
    for module in gc.get_objects():
        if (
            issubclass(type(module), nn.Module)
            and id(module) not in inside
            and "_parameters" in module.__dict__
        ):
            for held in _held_by(module, ""):
                yield held._replace(name=f"{held.name} of a {type(module).__name__} outside of this call")


def _held_by(module: nn.Module, prefix: str) -> Iterator[_Held]:
    for registry in (module._parameters, module._buffers):
        for name, tensor in list(registry.items()):
            if tensor is not None:
                yield _Held(prefix + name, tensor, True)
    for name, value in list(module.__dict__.items()):
        if name not in ("_parameters", "_buffers", "_modules"):
            for tensor in _tensors_in(value):
                yield _Held(prefix + name, tensor, False)


def _tensors_in(value: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and depth and len(value) <= _LONGEST:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(inner, depth - 1)


def _storage(tensor: torch.Tensor) -> int | None:
    """The key of the memory of a tensor. None: it has none, is made of other tensors, or its uses are refused."""
    plain = plain_of(tensor)
    if hasattr(type(plain), "__tensor_flatten__") or is_refused(plain) or not plain.numel():
        return None
    return storage_key(plain)


def _users(tensor: torch.Tensor) -> int:
    """The number of tensors over the memory of ``tensor``, also of those that no one here knows."""
    return storage_use_count(plain_of(tensor).untyped_storage()) - 1  # the handle that this makes


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors over one storage have a common element."""
    (start, stop), (first, last) = _range(one), _range(other)
    low, high = max(start, first), min(stop, last)
    if low >= high:
        return False
    if one.dtype.itemsize != other.dtype.itemsize or all(_is_dense(t) for t in (one, other)):
        return True
    size = one.dtype.itemsize
    begin = min(start, first)
    used = torch.zeros((max(stop, last) - begin) // size, dtype=torch.bool, device="cpu")
    used.as_strided(one.shape, one.stride(), (start - begin) // size).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), (first - begin) // size).any())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of the storage from the first element of a tensor to its last."""
    start, size = int(tensor.storage_offset()), tensor.dtype.itemsize
    span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start * size, (start + span) * size


def _is_dense(tensor: torch.Tensor) -> bool:
    start, stop = _range(tensor)
    return stop - start == tensor.numel() * tensor.dtype.itemsize
