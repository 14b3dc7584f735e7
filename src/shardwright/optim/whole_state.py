"""The state of a parameter that one rank steps whole, as every rank shows it between steps.

Tensors of one dimension or more are RaggedTensors: the owner has all elements, the other ranks none. All ranks have the
numbers and 0-d tensors. Only loaded state is communicated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.engine import RaggedDTensor, RaggedTensor
from shardwright.engine.compat import local_of
from shardwright.optim.moves import MeshRanks

_EXACT = 2**53  #: numbers are sent as float64, which is exact for integers up to this one


@dataclass(frozen=True)
class TensorLike:
    """Stands for a tensor in a description of state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


@dataclass(frozen=True)
class NumberLike:
    """Stands for a Python number in a description of state."""

    kind: type


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` applied to each value in its dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        changed = [mapped(inner, change) for inner in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for inner in value:
        yield from leaves(inner)


def described(state: dict[str, Any]) -> dict[str, Any]:
    """A description of the owner's state for the other ranks. It stays equal while only values change."""

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorLike(tuple(value.shape), value.dtype, value.device.type == "cpu")
        return NumberLike(type(value)) if _is_number(value) else value

    return mapped(state, describe)  # type: ignore[no-any-return]


def _is_number(value: Any) -> bool:
    return isinstance(value, (float, bool)) or (isinstance(value, int) and abs(value) <= _EXACT)


def numbers(state: dict[str, Any], device: torch.device) -> list[torch.Tensor]:
    """The numbers among the values, in order, each as a float64 tensor of one element on ``device``."""
    number_tensors = []
    for value in leaves(state):
        if isinstance(value, torch.Tensor):
            if not value.ndim:
                number_tensors.append(value.detach().to(device, torch.float64, non_blocking=True).view(1))
        elif _is_number(value):
            number_tensors.append(torch.full((1,), float(value), dtype=torch.float64, device=device))
    return number_tensors


def count_numbers(description: dict[str, Any]) -> int:
    return sum(
        isinstance(leaf, NumberLike) or (isinstance(leaf, TensorLike) and not leaf.shape)
        for leaf in leaves(description)
    )


def filled(description: dict[str, Any], device: torch.device, world: MeshRanks, owner: int) -> dict[str, Any]:
    """The state on ranks other than the owner: tensors without elements, and numbers that are set later."""

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, NumberLike):
            return leaf.kind()
        if not isinstance(leaf, TensorLike):
            return leaf
        place = torch.device("cpu") if leaf.on_host else device
        if not leaf.shape:
            return torch.zeros((), dtype=leaf.dtype, device=place)
        spec = world.spec_of(torch.Size(leaf.shape), owner)
        return RaggedTensor(torch.empty(spec.local_shape(world.rank), dtype=leaf.dtype, device=place), spec)

    return mapped(description, fill)  # type: ignore[no-any-return]


def set_numbers(state: dict[str, Any], values: Iterator[float]) -> dict[str, Any]:
    """``state`` with these numbers; 0-d tensors are written in place."""

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.ndim else value.fill_(next(values))
        return type(value)(next(values)) if _is_number(value) else value

    return mapped(state, change)  # type: ignore[no-any-return]


def shown(state: dict[str, Any], world: MeshRanks, owner: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The owner's values in the outer form, and in the form for the next step. Both use the same memory."""

    def hold(value: Any) -> Any:
        plain = isinstance(value, torch.Tensor) and value.ndim
        return value.detach().contiguous() if plain else value

    kept = mapped(state, hold)

    def show(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        spec = world.spec_of(value.shape, owner)
        return RaggedTensor(value.view(spec.local_shape(owner)), spec)

    return mapped(kept, show), kept


def settled(state: dict[str, Any], world: MeshRanks, owner: int) -> dict[str, Any]:
    """Loaded or edited state in the outer form. Every rank must call it, because sharded tensors move to the owner."""

    def settle(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, RaggedDTensor):
            value = value.ragged
        if not value.ndim:
            return value.full_tensor() if isinstance(value, (DTensor, RaggedTensor)) else value
        spec = world.spec_of(value.shape, owner)
        if isinstance(value, RaggedTensor) and value.spec == spec:
            return value
        return RaggedTensor.from_full(value, spec)

    return mapped(state, settle)  # type: ignore[no-any-return]


def inside(state: dict[str, Any]) -> dict[str, Any]:
    """On the owner: the state in the form for the optimizer's own code."""

    def open_up(value: Any) -> Any:
        return local_of(value).view(value.shape) if isinstance(value, RaggedTensor) else value

    return mapped(state, open_up)  # type: ignore[no-any-return]
