"""Plans for whole tensors: their owners, the rounds of a step, and the bytes that move to the owners and back.

Plans are plain data, made only from shapes, and equal on all ranks. This file knows no optimizers and no state.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.engine import RaggedSpec, RaggedTensor, cut_dim
from shardwright.engine.comm import noted
from shardwright.engine.compat import foreach_copy_

#: Bytes of gradients and of values or updates that an owner has whole in one round, unless one tensor has more.
LARGEST_ROUND, SMALLEST_ROUND = 32 * 2**20, 2**20
#: Rounds that an owner's tensors are cut into if sizes allow, so that moves have something to overlap with.
ROUNDS = 6
_ALIGNMENT = 16  # bytes: no dtype has larger elements


def balance(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Choose the owner of each item. The item with the highest cost goes first, to the rank with the least load.

    Costs are added to ``loads``.

    The largest load is at most 4/3 of the best possible (Graham 1969, longest processing time first).
    """
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[item] = least = min(range(len(loads)), key=loads.__getitem__)
        loads[least] += costs[item]
    return owners


class MeshRanks:
    """The ranks of a mesh, numbered in the mesh's order.

    Attributes:
        rank, size: this rank's number, and the number of ranks.
        group: a process group of all these ranks.
        order: the number of each rank of ``group``.
        places: mesh coordinates by number.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size = mesh.size()
        everywhere = self.spec_of(torch.Size([self.size]), 0)
        self.rank, self.group, self.order = everywhere.rank, everywhere.group, everywhere.order
        self.places = list(itertools.product(*map(range, mesh.shape)))

    def spec_of(self, shape: torch.Size, owner: int) -> RaggedSpec:
        """The spec of a tensor that is whole on one rank and empty on the others."""
        numel = max(math.prod(shape), 1)
        return RaggedSpec(shape, owner * numel, numel, self.mesh, numel, tuple(range(self.mesh.ndim)))


class RankParts:
    """The part of a sharded parameter that each rank of its mesh holds."""

    def __init__(self, p: DTensor | RaggedTensor, world: MeshRanks) -> None:
        shape = world.mesh.shape
        self._spec = p.spec if isinstance(p, RaggedTensor) else None
        self._dim, self._size, self._rows = 0, 1, 1
        if self._spec is not None:
            axes = [axis % world.mesh.ndim for axis in self._spec.axes]
            if self._spec.parallel is not None:
                raise ValueError(
                    f"It is expected to be sharded by sw.fully_shard alone, found tensor parallelism as "
                    f"{self._spec.parallel.placements}."
                )
        else:
            dims = [cut_dim(placement) for placement in p.placements]  # type: ignore[union-attr]
            axes = [a for a, dim in enumerate(dims) if dim is not None and shape[a] > 1]
            if len(axes) > 1 or any(placement.is_partial() for placement in p.placements):  # type: ignore[union-attr]
                raise ValueError(
                    "It is expected to be sharded over one mesh axis, as sw.fully_shard does it, found "
                    f"{p.placements}."  # type: ignore[union-attr]
                )
            if axes:
                self._dim = dims[axes[0]] or 0
                self._size = p.shape[self._dim]
                self._rows = -(-self._size // shape[axes[0]])  # as torch.chunk cuts
        self.count = math.prod(shape[axis] for axis in axes)
        self.total = p.numel()
        others = [axis for axis in range(world.mesh.ndim) if axis not in axes]
        #: The part of each rank, and the rank's number among the ranks with the same part.
        self.of = [_number(place, axes, shape) for place in world.places]
        self.copy_of = [_number(place, others, shape) for place in world.places]

    def numel(self, part: int) -> int:
        if self.count == 1:
            return self.total
        if self._spec is not None:
            start, stop = self._spec.range_of(part)
            return stop - start
        return self._length(part) * (self.total // self._size if self._size else 0)

    def view(self, full: torch.Tensor, part: int) -> torch.Tensor:
        """The part as a view of the contiguous whole tensor, in the shape of the local tensor."""
        if self._spec is not None:
            start, stop = self._spec.range_of(part)
            return full.view(-1)[start:stop].view(self._spec.local_shape(part))
        if self.count == 1:
            return full
        return full.narrow(self._dim, min(part * self._rows, self._size), self._length(part))

    def _length(self, part: int) -> int:
        return max(0, min(self._rows, self._size - part * self._rows))


def _number(place: Sequence[int], axes: Sequence[int], shape: Sequence[int]) -> int:
    number = 0
    for axis in axes:
        number = number * shape[axis] + place[axis]
    return number


@dataclass(frozen=True)
class StepItem:
    """A tensor to step: the ranks of its parts, its owner, and the dtypes that move to the owner and back."""

    key: int
    owner: int
    cost: float  #: of a step, in any unit
    parts: RankParts
    shape: torch.Size
    dtype: torch.dtype  #: of the new values that the owner sends, or of the update
    gradient_dtype: torch.dtype
    sends_update: bool = False  #: the owner gets no values, and sends an update

    @property
    def nbytes(self) -> int:
        return self.parts.total * (self.dtype.itemsize + self.gradient_dtype.itemsize)

    @property
    def is_whole(self) -> bool:
        """Whether its owner already has all of it."""
        return self.parts.numel(self.parts.of[self.owner]) == self.parts.total

    def sends_to_owner(self, rank: int) -> bool:
        """Whether this rank sends its copy of a part to the owner. The nearest rank in the mesh does."""
        parts = self.parts
        return not self.is_whole and rank != self.owner and parts.copy_of[rank] == parts.copy_of[self.owner]


@dataclass(frozen=True)
class Piece:
    """A part of an item that moves between this rank and another: of its gradient, of its values or its update."""

    item: StepItem
    part: int
    dtypes: tuple[torch.dtype, ...]


@dataclass
class Leg:
    """One all-to-all: this rank's pieces by the other rank's place in the group."""

    sends: list[list[Piece]]
    receives: list[list[Piece]]


@dataclass
class StepRound:
    """Items that are stepped together, and the moves to their owners and back."""

    items: list[StepItem] = field(default_factory=list)

    def to_owners(self, world: MeshRanks) -> Leg:
        leg = _empty(world)
        at = {number: i for i, number in enumerate(world.order)}
        for item in self.items:
            parts, dtypes = item.parts, (item.gradient_dtype, *(() if item.sends_update else (item.dtype,)))
            if item.owner == world.rank:
                for rank in range(world.size):
                    if item.sends_to_owner(rank):
                        _add(leg.receives[at[rank]], Piece(item, parts.of[rank], dtypes))
            elif item.sends_to_owner(world.rank):
                _add(leg.sends[at[item.owner]], Piece(item, parts.of[world.rank], dtypes))
        return leg

    def back(self, world: MeshRanks) -> Leg:
        leg = _empty(world)
        at = {number: i for i, number in enumerate(world.order)}
        for item in self.items:
            if item.owner == world.rank:
                for rank in range(world.size):
                    if rank != world.rank:
                        _add(leg.sends[at[rank]], Piece(item, item.parts.of[rank], (item.dtype,)))
            else:
                _add(leg.receives[at[item.owner]], Piece(item, item.parts.of[world.rank], (item.dtype,)))
        return leg


def _empty(world: MeshRanks) -> Leg:
    return Leg([[] for _ in world.order], [[] for _ in world.order])


def _add(pieces: list[Piece], piece: Piece) -> None:
    if piece.item.parts.numel(piece.part):
        pieces.append(piece)


def in_rounds(items: Sequence[StepItem]) -> list[StepRound]:
    """Divide items into rounds of bounded bytes per owner. Costly items come first, so owners need similar times."""
    by_owner: dict[int, list[StepItem]] = {}
    for item in sorted(items, key=lambda item: (-item.cost, item.key)):
        by_owner.setdefault(item.owner, []).append(item)
    if not by_owner:
        return []
    most = max(sum(item.nbytes for item in mine) for mine in by_owner.values())
    limit = min(max(most // ROUNDS, SMALLEST_ROUND), LARGEST_ROUND)
    rounds: list[StepRound] = []
    for mine in by_owner.values():
        number, filled = 0, 0
        for item in mine:
            if filled and filled + item.nbytes > limit:
                number, filled = number + 1, 0
            filled += item.nbytes
            while len(rounds) <= number:
                rounds.append(StepRound())
            rounds[number].items.append(item)
    for one in rounds:
        one.items.sort(key=lambda item: item.key)
    return rounds


class Mover:
    """Runs the legs of one plan many times. The offsets of pieces in the buffers are computed once."""

    def __init__(self, leg: Leg, world: MeshRanks, moves: bool) -> None:
        self._group = world.group
        self._moves = moves  #: whether any rank has something to send; equal on all ranks
        self.sends, self._send_sizes = _lay_out(leg.sends)
        self.receives, self._receive_sizes = _lay_out(leg.receives)

    def start(self, pieces: list[torch.Tensor], device: torch.device) -> Moving | None:
        """Send ``pieces``, one for each of ``sends``, in that order. None if no rank has anything to move.

        The collective is asynchronous: on an accelerator it runs on the group's own stream, after what the computation
        has queued so far.
        """
        if not self._moves:
            return None
        out = torch.empty(sum(self._send_sizes), dtype=torch.uint8, device=device)
        into = torch.empty(sum(self._receive_sizes), dtype=torch.uint8, device=device)
        if pieces:
            views = _views(out, self.sends, [piece.shape for piece in pieces])
            foreach_copy_(views, pieces, True)  # pieces may be on the host
        with noted("all-to-all of optimizer state", self._group, into.nbytes):
            work = dist.all_to_all_single(
                into, out, self._receive_sizes, self._send_sizes, group=self._group, async_op=True
            )
        return Moving(work, out, into)

    def finish(self, moving: Moving | None, targets: list[torch.Tensor]) -> None:
        """Wait, and copy the received pieces into ``targets``, one for each of ``receives``, in that order.

        If the targets are on the host, the host must still wait for the copies.
        """
        sources = self.arrived(moving, [target.shape for target in targets])
        if sources:
            foreach_copy_(targets, sources, True)

    def arrived(self, moving: Moving | None, shapes: list[torch.Size]) -> list[torch.Tensor]:
        """Wait, and return the received pieces in these shapes, as views of the buffer. Empty if nothing moved."""
        if moving is None:
            return []
        with noted("all-to-all of optimizer state", self._group, moving.into.nbytes, begins=False):
            moving.work.wait()
        return _views(moving.into, self.receives, shapes)


@dataclass
class Moving:
    """A running all-to-all, and its buffers, which must live until its end."""

    work: Any
    out: torch.Tensor
    into: torch.Tensor


#: Tensors of pieces in a buffer: the piece, the index among its tensors, the dtype, and the offset in bytes.
Places = list[tuple[Piece, int, torch.dtype, int]]


def _lay_out(by_rank: list[list[Piece]]) -> tuple[Places, list[int]]:
    """The places of each tensor of each piece, and the bytes for each rank."""
    placed, sizes, offset = [], [], 0
    for pieces in by_rank:
        start = offset
        for piece in pieces:
            for which, dtype in enumerate(piece.dtypes):
                placed.append((piece, which, dtype, offset))
                nbytes = piece.item.parts.numel(piece.part) * dtype.itemsize
                offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        sizes.append(offset - start)
    return placed, sizes


def _views(buffer: torch.Tensor, places: Places, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """The places in the buffer as tensors of these shapes. Each takes one operation: a step makes hundreds."""
    typed = {dtype: buffer.view(dtype) for dtype in {dtype for _, _, dtype, _ in places}}
    return [
        typed[dtype].as_strided(shape, _strides(shape), offset // dtype.itemsize)
        for (_, _, dtype, offset), shape in zip(places, shapes, strict=True)
    ]


@functools.lru_cache(maxsize=1024)
def _strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
