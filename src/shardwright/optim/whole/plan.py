"""The plan for tensors that are stepped whole: their owners, the rounds of a step, and the moves to owners and back.

A plan is a list of :class:`WholePiece`, made only from shapes and settings, so that it is equal on all ranks. This file
knows no optimizers and no state: an optimizer that needs other pieces whole adds entries to the list.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.engine import RaggedSpec, RaggedTensor
from shardwright.engine.comm import noted
from shardwright.engine.compat import foreach_copy_
from shardwright.optim.cuts import cut_axes

#: The least and the most bytes (gradients, and values or updates) of whole tensors that a round gives to one owner. A
#: single tensor may have more.
LARGEST_ROUND, SMALLEST_ROUND = 32 * 2**20, 2**20
#: The number of rounds into which an owner's tensors are divided if their sizes allow it, so that moves overlap with
#: arithmetic.
ROUNDS = 6
_ALIGNMENT = 16  # bytes: no dtype has larger elements

Locals = dict[int, torch.Tensor]  #: local or whole tensors with their gradients, by the key of the piece
#: Applies a part of an update: takes the piece's key, the local tensor, and the part.
Apply = Callable[[int, torch.Tensor, torch.Tensor], None]


def balance(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Return the owner of each item, and add the items' costs to ``loads``, the load of each rank.

    The item with the highest cost goes first, to the rank with the least load. So the largest load is at most 4/3 of
    the best possible (Graham 1969, longest processing time first).
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
        """Return the spec of a tensor that is whole on one rank and empty on the others."""
        numel = max(math.prod(shape), 1)
        return RaggedSpec(shape, owner * numel, numel, self.mesh, numel, tuple(range(self.mesh.ndim)))


class RankParts:
    """The part of a sharded parameter that each rank of its mesh holds.

    Attributes:
        total: the number of the parameter's elements.
        of: the part of each rank.
        copy_of: each rank's number among the ranks that hold the same part.
    """

    def __init__(self, p: DTensor | RaggedTensor, world: MeshRanks) -> None:
        shape = world.mesh.shape
        self.total = p.numel()
        self._spec, self._dim = None, 0
        if isinstance(p, RaggedTensor):
            self._spec = p.spec
            if p.spec.parallel is not None:
                raise ValueError(
                    f"It is expected to be sharded by sw.fully_shard alone, found tensor parallelism as "
                    f"{p.spec.parallel.placements}."
                )
            axes = [axis % world.mesh.ndim for axis in p.spec.axes]
            self._bounds, self._row = p.spec.ranges, 1
        else:
            cuts = cut_axes(p)
            if len(cuts) > 1 or any(placement.is_partial() for placement in p.placements):
                raise ValueError(
                    "It is expected to be sharded over one mesh axis, as sw.fully_shard does it, found "
                    f"{p.placements}."
                )
            axes = [axis for axis, _ in cuts]
            self._bounds, self._row = [(0, 1)], self.total
            for axis, self._dim in cuts:
                size = p.shape[self._dim]
                rows = -(-size // shape[axis])  # as torch.chunk cuts
                self._bounds = [(min(i * rows, size), min((i + 1) * rows, size)) for i in range(shape[axis])]
                self._row = self.total // size if size else 0
        others = [axis for axis in range(world.mesh.ndim) if axis not in axes]
        self.of = [_number(place, axes, shape) for place in world.places]
        self.copy_of = [_number(place, others, shape) for place in world.places]

    def numel(self, part: int) -> int:
        start, stop = self._bounds[part]
        return (stop - start) * self._row

    def view(self, full: torch.Tensor, part: int) -> torch.Tensor:
        """Return the part as a view of the contiguous whole tensor, in the shape of the local tensor."""
        start, stop = self._bounds[part]
        if self._spec is not None:
            return full.view(-1)[start:stop].view(self._spec.local_shape(part))
        return full if len(self._bounds) == 1 else full.narrow(self._dim, start, stop - start)


def _number(place: Sequence[int], axes: Sequence[int], shape: Sequence[int]) -> int:
    """Return the row-major number of a mesh coordinate among those of ``axes``."""
    return functools.reduce(lambda number, axis: number * shape[axis] + place[axis], axes, 0)


@dataclass(frozen=True)
class WholePiece:
    """A tensor that its owner steps whole: the parts that the ranks hold, and the dtypes that move there and back."""

    key: int
    owner: int
    cost: float  #: of a step, in any unit
    parts: RankParts
    shape: torch.Size
    dtype: torch.dtype  #: of the new values that the owner sends, or of the update
    gradient_dtype: torch.dtype
    sends_update: bool = False  #: the owner gets no values, and sends an update
    on_host: bool = False  #: the ranks store their parts in the CPU's memory

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient, and of its values or update."""
        return self.parts.total * (self.dtype.itemsize + self.gradient_dtype.itemsize)

    @property
    def is_whole(self) -> bool:
        """Whether its owner holds all of it between steps, too."""
        return self.parts.numel(self.parts.of[self.owner]) == self.parts.total

    def sends_to_owner(self, rank: int) -> bool:
        """Return whether this rank sends its copy of a part to the owner. The nearest rank in the mesh does."""
        parts = self.parts
        return not self.is_whole and rank != self.owner and parts.copy_of[rank] == parts.copy_of[self.owner]


def in_rounds(pieces: Sequence[WholePiece]) -> list[list[WholePiece]]:
    """Divide pieces into rounds of bounded bytes per owner. Costly ones come first, so owners need similar times."""
    by_owner: dict[int, list[WholePiece]] = {}
    for piece in sorted(pieces, key=lambda piece: (-piece.cost, piece.key)):
        by_owner.setdefault(piece.owner, []).append(piece)
    most = max((sum(piece.nbytes for piece in mine) for mine in by_owner.values()), default=0)
    limit = min(max(most // ROUNDS, SMALLEST_ROUND), LARGEST_ROUND)
    rounds: list[list[WholePiece]] = []
    for mine in by_owner.values():
        number, filled = 0, 0
        for piece in mine:
            if filled and filled + piece.nbytes > limit:
                number, filled = number + 1, 0
            filled += piece.nbytes
            if len(rounds) == number:
                rounds.append([])
            rounds[number].append(piece)
    return [sorted(one, key=lambda piece: piece.key) for one in rounds]


class Move(NamedTuple):
    """A tensor that travels between this rank and another: a part of a piece's gradient, or of its values or update."""

    piece: WholePiece
    part: int
    is_gradient: bool
    other: int  #: the number of the other rank

    @property
    def dtype(self) -> torch.dtype:
        return self.piece.gradient_dtype if self.is_gradient else self.piece.dtype


class Round:
    """Pieces that are stepped together, and their moves to owners and back, on this rank.

    Attributes:
        mine: the pieces that this rank owns.
    """

    def __init__(self, pieces: Sequence[WholePiece], world: MeshRanks) -> None:
        me = self._rank = world.rank
        self.mine = [piece for piece in pieces if piece.owner == me]
        #: Keys of pieces that are whole on this rank's device. They are stepped in place.
        self._in_place = {piece.key for piece in self.mine if piece.is_whole and not piece.on_host}
        there: tuple[list[Move], list[Move]] = [], []  # sent and received
        back: tuple[list[Move], list[Move]] = [], []
        for piece in pieces:
            part, needed = piece.parts.of, (True,) if piece.sends_update else (True, False)
            if piece.owner == me:
                for rank in range(world.size):
                    if piece.sends_to_owner(rank):
                        there[1].extend(Move(piece, part[rank], gradient, rank) for gradient in needed)
                    if rank != me:
                        back[0].append(Move(piece, part[rank], False, rank))
            else:
                if piece.sends_to_owner(me):
                    there[0].extend(Move(piece, part[me], gradient, piece.owner) for gradient in needed)
                back[1].append(Move(piece, part[me], False, piece.owner))
        self._there = Exchange(*there, world, any(not piece.is_whole for piece in pieces))
        self._back = Exchange(*back, world, world.size > 1)

    def send_gradients(self, locals_: Locals, device: torch.device) -> None:
        """Begin to send gradients to owners, and the values that they need."""
        sent: list[Any] = []
        for move in self._there.sends:
            local = locals_[move.piece.key]
            sent.append(local.grad if move.is_gradient else local)
        self._there.start(sent, device)

    def assemble(self, locals_: Locals, device: torch.device) -> Locals:
        """Return this rank's whole tensors with their gradients. Of a piece that sends an update it is the gradient
        alone."""
        gradients: Locals = {}
        values: Locals = {}
        for piece in self.mine:
            local: Any = locals_[piece.key]
            gradients[piece.key] = self._with_own_part(piece, local.grad, device)
            if not piece.sends_update:
                values[piece.key] = self._with_own_part(piece, local, device)
        targets = []
        for move in self._there.receives:
            full = (gradients if move.is_gradient else values)[move.piece.key]
            targets.append(move.piece.parts.view(full, move.part))
        arrived = self._there.finish([target.shape for target in targets])
        if arrived:
            foreach_copy_(targets, arrived, True)
        for key, full in values.items():
            if gradients[key].dtype != full.dtype:
                full.grad_dtype = gradients[key].dtype
            full.grad = gradients[key]
        return gradients | values

    def _with_own_part(self, piece: WholePiece, local: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the whole tensor with this rank's part: ``local`` itself if it is whole, else new memory."""
        if piece.key in self._in_place:
            return local.contiguous().view(piece.shape)
        full = torch.empty(piece.shape, dtype=local.dtype, device=device)
        piece.parts.view(full, piece.parts.of[self._rank]).copy_(local, non_blocking=True)
        return full

    def send_back(self, whole: Locals, locals_: Locals, device: torch.device, apply: Apply) -> None:
        """Begin to send new values or updates to the other ranks, and write this rank's parts."""
        sent = [move.piece.parts.view(whole[move.piece.key], move.part) for move in self._back.sends]
        self._back.start(sent, device)
        for piece in self.mine:
            local, full = locals_[piece.key], whole[piece.key]
            part = piece.parts.view(full, piece.parts.of[self._rank])
            if piece.sends_update:
                apply(piece.key, local, part)
            elif full.data_ptr() != local.data_ptr():  # else it was stepped in place
                local.copy_(part, non_blocking=True)

    def receive(self, locals_: Locals, apply: Apply) -> None:
        """Write the new values from other owners, or apply their updates."""
        pieces = [move.piece for move in self._back.receives]
        arrived = self._back.finish([locals_[piece.key].shape for piece in pieces])
        values = []
        for piece, source in zip(pieces, arrived, strict=True):
            if piece.sends_update:
                apply(piece.key, locals_[piece.key], source)
            else:
                values.append((locals_[piece.key], source))
        if values:
            foreach_copy_([local for local, _ in values], [source for _, source in values], True)


class Exchange:
    """One all-to-all that every step repeats. The offsets of its tensors in the buffers are computed once.

    Attributes:
        sends, receives: the moves of this rank, in the order of the buffers.
    """

    def __init__(self, sends: list[Move], receives: list[Move], world: MeshRanks, moves: bool) -> None:
        self._group = world.group
        self._moves = moves  #: whether any rank has something to send; equal on all ranks
        self.sends, self._send_offsets, self._send_sizes = _laid_out(sends, world)
        self.receives, self._receive_offsets, self._receive_sizes = _laid_out(receives, world)
        #: the running collective, and its buffers, which must live until its end
        self._running: tuple[Any, torch.Tensor, torch.Tensor] | None = None

    def start(self, tensors: list[torch.Tensor], device: torch.device) -> None:
        """Send ``tensors``, one for each of ``sends``, if any rank has something to move.

        The collective is asynchronous: on an accelerator it runs on the group's own stream, after what the computation
        has queued so far.
        """
        if not self._moves:
            return
        out = torch.empty(sum(self._send_sizes), dtype=torch.uint8, device=device)
        into = torch.empty(sum(self._receive_sizes), dtype=torch.uint8, device=device)
        if tensors:
            views = _views(out, self.sends, self._send_offsets, [tensor.shape for tensor in tensors])
            foreach_copy_(views, tensors, True)  # tensors may be on the host
        with noted("all-to-all of optimizer state", self._group, into.nbytes):
            work = dist.all_to_all_single(
                into, out, self._receive_sizes, self._send_sizes, group=self._group, async_op=True
            )
        self._running = work, out, into

    def finish(self, shapes: list[torch.Size]) -> list[torch.Tensor]:
        """Wait, and return the received tensors in these shapes, as views of the buffer. Empty if nothing moved."""
        if self._running is None:
            return []
        work, _, into = self._running
        with noted("all-to-all of optimizer state", self._group, into.nbytes, begins=False):
            work.wait()
        self._running = None
        return _views(into, self.receives, self._receive_offsets, shapes)


def _laid_out(moves: list[Move], world: MeshRanks) -> tuple[list[Move], list[int], list[int]]:
    """Return the moves in the order of the group's ranks, the offset of each in bytes, and the bytes for each rank."""
    by_rank: dict[int, list[Move]] = {number: [] for number in world.order}
    for move in moves:
        if move.piece.parts.numel(move.part):
            by_rank[move.other].append(move)
    offsets, sizes, offset = [], [], 0
    for mine in by_rank.values():
        start = offset
        for move in mine:
            offsets.append(offset)
            nbytes = move.piece.parts.numel(move.part) * move.dtype.itemsize
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        sizes.append(offset - start)
    return [move for mine in by_rank.values() for move in mine], offsets, sizes


def _views(
    buffer: torch.Tensor, moves: list[Move], offsets: list[int], shapes: list[torch.Size]
) -> list[torch.Tensor]:
    """Return tensors of these shapes in the buffer. Each takes one operation, because a step makes hundreds."""
    typed = {dtype: buffer.view(dtype) for dtype in {move.dtype for move in moves}}
    return [
        typed[move.dtype].as_strided(shape, _strides(shape), offset // move.dtype.itemsize)
        for move, offset, shape in zip(moves, offsets, shapes, strict=True)
    ]


@functools.lru_cache(maxsize=1024)
def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
