"""A nested state as a checkpoint holds it: named tensors with this rank's boxes of them, and values.

A state is a dict of tensors (plain, DTensors, ragged ones, FSDP1's), plain values, and dicts and lists of them. A dict
or list without tensors is one value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from shardwright.checkpoint.format.boxes import Box
from shardwright.checkpoint.format.index import Keys, StoredValue, name_of
from shardwright.checkpoint.format.values import DEEPEST
from shardwright.engine import ascends
from shardwright.engine.compat import boxes_to_load, boxes_to_save

#: the most bytes of a chunk in a file. Each thread of a save and of a load copies one chunk at a time.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a state in memory, whole, sharded or of FSDP1, under its name."""

    name: str
    path: Keys
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def boxes_to_save(self) -> list[Box]:
        """Return this rank's boxes, cut into ones of at most :data:`CHUNK_BYTES`. Every rank that has a copy has the
        same.

        Raises:
            ValueError: the tensor has no values of its own to save.
        """
        if self.tensor.is_meta:
            raise ValueError(f"{self.name} is on the meta device: it has no values to save")
        if isinstance(self.tensor, DTensor) and any(isinstance(p, Partial) for p in self.tensor.placements):
            raise ValueError(
                f"{self.name} is a DTensor that is not summed over its ranks yet (placement Partial)"
            )
        self._check_order()
        is_fsdp1s = hasattr(self.tensor, "local_shards")  # it has none of these attributes
        if not is_fsdp1s and (self.tensor.layout is not torch.strided or self.tensor.is_quantized):
            raise ValueError(f"{self.name} is sparse or quantized; a checkpoint holds dense tensors")
        whole = [
            Box(tuple(o), local.detach()) for o, local in boxes_to_save(self.name, _by_protocol(self.tensor))
        ]
        return [each for box in whole for each in _cut(box, self.dtype.itemsize)]

    def boxes_to_load(self) -> list[Box]:
        """Return the boxes that this rank needs, with the memory to load them into.

        Raises:
            ValueError: the ranks of its mesh do not ascend.
        """
        self._check_order()
        return [
            Box(tuple(o), local.detach()) for o, local in boxes_to_load(self.name, _by_protocol(self.tensor))
        ]

    def _check_order(self) -> None:
        """Raise ValueError if torch does not say clearly which elements this rank has."""
        if isinstance(self.tensor, DTensor):
            mesh, cuts = self.tensor.device_mesh, enumerate(self.tensor.placements)
            if not ascends(mesh, [axis for axis, p in cuts if not p.is_replicate()]):
                raise ValueError(
                    f"{self.name} is a DTensor on ranks {mesh.mesh.tolist()}, which do not ascend: torch numbers its "
                    "parts in two ways there. Distribute it over a mesh of ascending ranks"
                )


def _by_protocol(tensor: Tensor) -> Tensor:
    """Return the tensor in the form that says which elements a rank has. torch makes a plain DTensor of a ragged
    DTensor, which would be taken for one with equal chunks of rows."""
    ragged = tensor._local_tensor if type(tensor) is DTensor else tensor
    as_dtensor = getattr(ragged, "as_dtensor", None)
    return tensor if as_dtensor is None else as_dtensor()


@dataclass(frozen=True)
class NestedState:
    """A nested state taken apart. Tensors and values are under the names that torch's distributed checkpoint gives."""

    tensors: Mapping[str, StateTensor]
    values: Mapping[str, StoredValue]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> NestedState:
        """Take a nested state apart.

        Raises:
            ValueError: two entries have the same name, or a dict with tensors has other keys than strings and integers.
        """
        tensors: dict[str, StateTensor] = {}
        values: dict[str, StoredValue] = {}
        for path, value in _leaves((), state):
            name = name_of(path)
            if name in tensors or name in values:
                raise ValueError(f"two entries of the state have the name {name!r}; rename one of its keys")
            if isinstance(value, Tensor):
                tensors[name] = StateTensor(name, path, value)
            else:
                values[name] = StoredValue(path, value)
        return cls(tensors, values)


def _leaves(path: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    """Tensors, and the largest dicts and lists without tensors. The keys of the state itself are always separate."""
    if len(path) > DEEPEST:
        raise _too_deep(path)
    if isinstance(value, Tensor) or (path and not _has_tensors(value, path)):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if type(key) is not int and not isinstance(key, str):
                raise ValueError(
                    f"{name_of(path) or 'the state'} has the key {key!r} in a dict with tensors, where keys are "
                    "strings or integers. Make it a string"
                )
            step = (key,) if type(key) is int else str(key)
            yield from _leaves((*path, step), each)
    else:
        for number, each in enumerate(value):
            yield from _leaves((*path, number), each)


def _has_tensors(value: Any, path: Keys, depth: int = 0) -> bool:
    if depth > DEEPEST:
        raise _too_deep(path)
    if isinstance(value, Mapping):
        return any(_has_tensors(each, path, depth + 1) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_tensors(each, path, depth + 1) for each in value)
    return isinstance(value, Tensor)


def _too_deep(path: Keys) -> ValueError:
    return ValueError(
        f"{name_of(path)[:200]} holds itself, or is more than {DEEPEST} values deep, which a checkpoint cannot hold"
    )


def nested(leaves: Mapping[Keys, Any]) -> Any:
    """Return the nested state of these leaves: the inverse of taking it apart.

    Tuples that held tensors become lists.
    """
    if () in leaves:
        return leaves[()]
    inner: dict[Any, dict[Keys, Any]] = {}
    for path, value in leaves.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    if inner and all(isinstance(step, int) for step in inner):
        return [nested(inner[step]) for step in sorted(inner)]
    return {step[0] if isinstance(step, tuple) else step: nested(each) for step, each in inner.items()}


def _cut(box: Box, itemsize: int) -> Iterator[Box]:
    """Boxes of at most :data:`CHUNK_BYTES`, cut along the first dimensions. A box without elements gives none."""
    nbytes = prod(box.sizes) * itemsize
    if not nbytes:
        return
    if nbytes <= CHUNK_BYTES:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    rows = max(1, CHUNK_BYTES // (nbytes // box.sizes[dim]))
    for start in range(0, box.sizes[dim], rows):
        length = min(rows, box.sizes[dim] - start)
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        yield from _cut(Box(offsets, box.local.narrow(dim, start, length)), itemsize)
