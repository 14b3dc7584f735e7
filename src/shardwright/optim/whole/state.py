"""A parameter that one rank, its owner, steps whole, and the optimizer state that belongs to it.

The state has two forms. The owner's code steps with plain tensors. Between steps every rank shows the state: tensors of
one dimension or more as RaggedTensors, of which the owner has all elements and other ranks none; numbers and 0-d
tensors as they are. Only loaded state is communicated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.engine import Host, RaggedDTensor, RaggedTensor, unit_of
from shardwright.engine.compat import local_of
from shardwright.optim.whole.plan import MeshRanks
from shardwright.optim.whole.updates import Updates

_EXACT = 2**53  #: numbers are sent as float64, which is exact for integers up to this one


@dataclass(frozen=True)
class Like:
    """Stands for a tensor or a Python number in a description of state, whose value may change."""

    kind: type
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    on_host: bool = False


class WholeParameter:
    """A parameter that needs to be whole, and the state that belongs to it.

    Attributes:
        owner: number of the rank in its mesh that steps it.
        updates: how its step is divided. None: it is stepped whole, by the optimizer's own code.
        host: stores its state between steps. None: its state stays on the device on which it is stepped.
        on_host: whether the parameter and its gradient are stored there, too.
        state: on the owner the state for the optimizer's own code; on other ranks empty.
        description: the description of the state, which every rank has.
    """

    def __init__(
        self,
        index: int,
        world: MeshRanks,
        name: str,
        p: DTensor | RaggedTensor,
        cost: float,
        updates: Updates | None,
        owner: int,
    ) -> None:
        self.index, self.name, self.p, self.cost, self.owner = index, name, p, cost, owner
        self._world, self.is_mine = world, owner == world.rank
        self.host, unit = host_of_whole(p), unit_of(p)
        self.on_host = unit is not None and unit.host is not None
        # Values on the host travel to the owner's device. An update would be applied on the CPU, which may round
        # differently.
        self.updates = None if self.on_host else updates
        self.state: dict[str, Any] = {}
        self.description: dict[str, Any] = {}
        self._seen: list[
            Any
        ] = []  #: values of the outer form, by which the next step notices loaded or edited ones
        self._shown: list[
            Any
        ] = []  #: values of ``state`` in the outer form, by which a step's new ones are noticed

    def settle(self, outer: Any) -> None:
        """Adopt state that was loaded or edited. If it is sharded in another way, all ranks communicate."""
        state = outer.get(self.p) or {}
        if _same(leaves(state), self._seen):
            return
        state = mapped(state, self._settled)
        self.state = mapped(state, _inner) if self.is_mine else {}
        self._shown = list(leaves(self.state))
        self.description = described(state)
        self._show(state, outer)

    def _settled(self, value: Any) -> Any:
        """Return a loaded or edited value in the outer form. Sharded tensors move to the owner."""
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, RaggedDTensor):
            value = value.ragged
        if not value.ndim:
            return value.full_tensor() if isinstance(value, (DTensor, RaggedTensor)) else value
        spec = self._world.spec_of(value.shape, self.owner)
        if isinstance(value, RaggedTensor) and value.spec == spec:
            return value
        return RaggedTensor.from_full(value, spec)

    def _show(self, state: dict[str, Any], outer: Any) -> None:
        """Put the outer form of the state into ``outer``."""
        if state or self.p in outer:
            values = outer[self.p]
            values.clear()
            values.update(state)
        self._seen = list(leaves(state))

    def show_replaced(self, outer: Any) -> None:
        """Show the new values on the owner if a step has replaced values of the state."""
        if _same(leaves(self.state), self._shown):
            return

        def show(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.ndim:
                return value
            spec = self._world.spec_of(value.shape, self.owner)
            return RaggedTensor(value.view(spec.local_shape(self.owner)), spec)

        self.state = mapped(self.state, _contiguous)  # both forms use the same memory
        self._shown = list(leaves(self.state))
        self._show(mapped(self.state, show), outer)

    def adopt(self, description: dict[str, Any], numbers: Iterator[float], outer: Any,
              device: torch.device) -> None:  # fmt: skip
        """Adopt the owner's description of the state. Other ranks show it with the owner's numbers."""
        previous, self.description = self.description, description
        if self.is_mine or (not description and not previous):
            return
        if previous == description:
            state = dict(outer[self.p])
        else:
            state = mapped(description, lambda leaf: self._filled(leaf, device))
        self._show(_with_numbers(state, numbers), outer)

    def _filled(self, leaf: Any, device: torch.device) -> Any:
        """Return the value on ranks other than the owner: a tensor without elements, or a number that is set later."""
        if not isinstance(leaf, Like):
            return leaf
        if leaf.dtype is None:
            return leaf.kind()
        place = torch.device("cpu") if leaf.on_host else device
        if not leaf.shape:
            return torch.zeros((), dtype=leaf.dtype, device=place)
        spec = self._world.spec_of(torch.Size(leaf.shape), self.owner)
        local = torch.empty(spec.local_shape(self._world.rank), dtype=leaf.dtype, device=place)
        return RaggedTensor(local, spec)


def host_of_whole(p: torch.Tensor) -> Host | None:
    """Return the host that stores the state of a parameter between steps if the parameter is stepped whole, on the
    device. None: the parameter's device stores it."""
    unit = unit_of(p)
    return (unit.host or unit.state_host) if unit is not None else None


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change`` applied to each value in its dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        changed = [mapped(inner, change) for inner in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield each value in these dicts, lists and tuples, in the order of :func:`mapped`."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for inner in value:
        yield from leaves(inner)


def described(state: dict[str, Any]) -> dict[str, Any]:
    """Return a description of the owner's state for the other ranks. It stays equal while only values change."""

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Like(torch.Tensor, tuple(value.shape), value.dtype, value.device.type == "cpu")
        return Like(type(value)) if _is_number(value) else value

    return mapped(state, describe)  # type: ignore[no-any-return]


def count_numbers(description: dict[str, Any]) -> int:
    """Return how many numbers :func:`numbers` finds in a state with this description."""
    return sum(isinstance(leaf, Like) and not leaf.shape for leaf in leaves(description))


def numbers(state: dict[str, Any], device: torch.device) -> list[torch.Tensor]:
    """Return numbers and 0-d tensors of a state, in order, each as a float64 tensor of one element on ``device``."""
    number_tensors = []
    for value in leaves(state):
        if isinstance(value, torch.Tensor):
            if not value.ndim:
                number_tensors.append(value.detach().to(device, torch.float64, non_blocking=True).view(1))
        elif _is_number(value):
            number_tensors.append(torch.full((1,), float(value), dtype=torch.float64, device=device))
    return number_tensors


def _with_numbers(state: dict[str, Any], values: Iterator[float]) -> dict[str, Any]:
    """Return ``state`` with these numbers; 0-d tensors are written in place."""

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.ndim else value.fill_(next(values))
        return type(value)(next(values)) if _is_number(value) else value

    return mapped(state, change)  # type: ignore[no-any-return]


def _is_number(value: Any) -> bool:
    return isinstance(value, (float, bool)) or (isinstance(value, int) and abs(value) <= _EXACT)


def _contiguous(value: Any) -> Any:
    """Return a tensor of state without its graph, in contiguous memory."""
    return value.detach().contiguous() if isinstance(value, torch.Tensor) and value.ndim else value


def _inner(value: Any) -> Any:
    """Return a value of the outer form as the optimizer's own code on the owner gets it."""
    return local_of(value).view(value.shape) if isinstance(value, RaggedTensor) else value


def _same(values: Iterable[Any], others: list[Any]) -> bool:
    """Return whether these are the same objects."""
    values = list(values)
    return len(values) == len(others) and all(a is b for a, b in zip(values, others, strict=True))
