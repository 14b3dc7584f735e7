"""The spec of a ragged tensor: the range of elements that each rank owns, and this range as rectangles."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.engine.tensors.meshes import group_of
from shardwright.engine.tensors.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class RaggedSpec:
    """The place of a tensor of ``shape``: from element ``offset`` of a segment that is cut every ``chunk`` elements.

    Rank r along the mesh dimension ``axes`` owns ``[r * chunk, (r + 1) * chunk)`` of the segment. Along the other
    dimensions the tensor is replicated. The first of several axes is the most significant. Without axes the tensor is
    whole on every rank. ``granule`` elements, counted from the tensor's first, are never cut. With ``parallel`` all
    values, also ``shape``, describe this rank's part of a tensor of ``global_shape``.

    Raises:
        ValueError: the tensor has no dimension, does not fit the segment, or a granule is cut.
    """

    shape: torch.Size
    offset: int
    chunk: int
    mesh: DeviceMesh
    granule: int = 1
    axes: tuple[int, ...] = (-1,)
    parallel: TensorParallel | None = None

    def __post_init__(self) -> None:
        if (self.axes and not self.shape) or self.offset < 0 or self.chunk < 1 or self.granule < 1:
            raise ValueError(
                "A ragged tensor needs at least one dimension, offset >= 0, chunk >= 1 and granule >= 1, got "
                f"{tuple(self.shape)}, {self.offset}, {self.chunk}, {self.granule}. A 0-d tensor is not cut: pass "
                "axes=()."
            )
        if self.offset + self.numel > self.world_size * self.chunk:
            raise ValueError(
                f"A tensor of {self.numel} elements at offset {self.offset} does not fit a segment of "
                f"{self.world_size} chunks of {self.chunk}."
            )
        if not self._cuts_are_multiples_of(self.granule):
            raise ValueError(
                f"Chunks of {self.chunk} elements cut a tensor of shape {tuple(self.shape)} at offset {self.offset} "
                f"inside its granules of {self.granule}."
            )

    def stable_hash(self) -> str:
        """Return a hash that is equal exactly in those processes that have this part of this cut."""
        cut = (tuple(self.shape), self.offset, self.chunk, self.granule, self.axes, tuple(self.global_shape))
        return hashlib.sha256(repr((cut, self.mesh.mesh.tolist(), self.rank)).encode()).hexdigest()

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def global_shape(self) -> torch.Size:
        return self.shape if self.parallel is None else self.parallel.shape

    @functools.cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which parts are gathered, one after another. Each group has each element just once."""
        own = (self.group,) if self.group is not None and self.world_size > 1 else ()
        return (*own, *(self.parallel.groups if self.parallel is not None else ()))

    @functools.cached_property
    def world_size(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @functools.cached_property
    def rank(self) -> int:
        here = self.mesh.get_coordinate()
        assert here is not None
        return self._number(here)

    @functools.cached_property
    def group(self) -> dist.ProcessGroup | None:
        if not self.axes:
            return None
        if len(self.axes) == 1:
            return self.mesh.get_group(self.axes[0] % self.mesh.ndim)
        return group_of(self.mesh)

    @functools.cached_property
    def order(self) -> list[int]:
        """The rank number of this class for each rank of ``group``."""
        if len(self.axes) < 2:
            return list(range(self.world_size))
        places = {
            int(self.mesh.mesh[place]): self._number(place)
            for place in itertools.product(*map(range, self.mesh.shape))
        }
        assert self.group is not None
        return [places[rank] for rank in dist.get_process_group_ranks(self.group)]

    def _number(self, place: Sequence[int]) -> int:
        number = 0
        for axis in self.axes:
            number = number * self.mesh.shape[axis] + place[axis]
        return number

    @property
    def cuts_last(self) -> bool:
        """Whether only the last mesh dimension cuts."""
        return (
            self.parallel is None
            and len(self.axes) == 1
            and self.axes[0] % self.mesh.ndim == self.mesh.ndim - 1
        )

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return the first and the last + 1 of the tensor's elements, in memory order, that ``rank`` owns."""
        start, stop = rank * self.chunk - self.offset, (rank + 1) * self.chunk - self.offset
        return min(max(start, 0), self.numel), min(max(stop, 0), self.numel)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return ``(rows, last dimension)`` if no rank cuts a row, else ``(elements,)``.

        So all ranks have local tensors with the same number of dimensions.
        """
        start, stop = self.range_of(rank)
        if not self.shape:
            return ()
        return ((stop - start) // self.shape[-1], self.shape[-1]) if self.by_rows else (stop - start,)

    @functools.cached_property
    def ranges(self) -> list[tuple[int, int]]:
        return [self.range_of(rank) for rank in range(self.world_size)]

    @functools.cached_property
    def by_rows(self) -> bool:
        return len(self.shape) > 1 and self.numel > 0 and self._cuts_are_multiples_of(self.shape[-1])

    def _cuts_are_multiples_of(self, granule: int) -> bool:
        first = self.chunk - self.offset % self.chunk  # the first cut is here, then every chunk
        if first >= self.numel:
            return True
        return first % granule == 0 and (first + self.chunk >= self.numel or self.chunk % granule == 0)

    @functools.cached_property
    def boxes(self) -> list[tuple[torch.Size, torch.Size]]:
        """This rank's range as rectangles (offsets, sizes) of the global tensor, in memory order."""
        if not math.prod(self.global_shape):  # one empty rectangle, so that checkpoints have the tensor
            return [(torch.Size([0] * len(self.shape)), self.shape)]
        own_boxes = boxes_of(tuple(self.shape), *self.ranges[self.rank])
        start = self.parallel.box[0] if self.parallel is not None else (0,) * len(self.shape)
        return [
            (torch.Size([at + o for at, o in zip(start, offsets, strict=True)]), torch.Size(sizes))
            for offsets, sizes in own_boxes
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedSpec:
        return self


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[tuple[list[int], list[int]]]:
    """Cut elements ``[start, stop)`` of a contiguous tensor into rectangles: at most 2 * dimensions - 1 of them."""
    if start >= stop:
        return []
    if not shape:
        return [([], [])]
    if len(shape) == 1:
        return [([start], [stop - start])]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # both ends in the same row
        return _in_row(shape, last, start, stop)
    boxes = _in_row(shape, first - 1, start, first * row)
    if first < last:
        boxes.append(([first] + [0] * (len(shape) - 1), [last - first, *shape[1:]]))
    return boxes + _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[tuple[list[int], list[int]]]:
    before = row * math.prod(shape[1:])
    return [([row, *o], [1, *s]) for o, s in boxes_of(shape[1:], start - before, stop - before)]
