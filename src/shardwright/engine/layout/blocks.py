"""The matrices of a unit's parameters in the ranks' chunks, for codecs that scale blocks of a matrix together.

Pure, as all planning here. A parameter of more than two dimensions is a stack of matrices, and each of them has
separate blocks. Offsets and lengths are in elements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.engine.layout.planner import RaggedSegment
from shardwright.engine.layout.segments import Segment, TensorSpec
from shardwright.engine.layout.units import UnitLayout

BlockShape = tuple[int, int]  #: rows and columns of a block


@dataclass(frozen=True)
class HeldPart:
    """A contiguous part of one parameter in a rank's chunk of a segment.

    Attributes:
        piece: the number of the segment among all gathered segments of the unit.
        offset: where the part begins in the chunk.
        shape: its dimensions as they are in memory, outermost first.
        inverse: the permutation to the parameter's own order of dimensions.
        coded: whether the codec encodes it.
    """

    piece: int
    offset: int
    shape: tuple[int, ...]
    inverse: tuple[int, ...]
    coded: bool

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def own_shape(self) -> tuple[int, ...]:
        """The block's shape in the parameter's own order of dimensions."""
        return tuple(self.shape[d] for d in self.inverse)

    @cached_property
    def matrices(self) -> tuple[int, int, int]:
        """The number of matrices, and their rows and columns."""
        *stack, rows, columns = self.own_shape
        return math.prod(stack), rows, columns


@dataclass(frozen=True)
class Holding:
    """The parts on each of the ranks [first, stop), which are at the same places of their chunks."""

    first: int
    stop: int
    parts: tuple[HeldPart, ...]


def plan_holdings(layout: UnitLayout, coded: Collection[int]) -> tuple[Holding, ...]:
    """The parts of every rank. Neighbouring ranks with equal parts are in one holding.

    Args:
        layout: the unit's layout. It may cut no block of a ``coded`` parameter, see :func:`cut_in_a_block`.
        coded: indices of the parameters that the codec encodes. They have at least two dimensions.
    """
    segments = [s for run in layout.runs if not run.extended for s in run.segments if s.chunk]
    holdings: list[Holding] = []
    for rank in range(layout.world_size):
        parts: list[HeldPart] = []
        for piece, segment in enumerate(segments):
            if isinstance(segment, RaggedSegment):
                for member in segment.members:
                    index, (start, stop) = member.index, segment.range_of(member, rank)
                    offset = member.offset if segment.replicated else member.offset - rank * segment.chunk
                    parts += _ranges(
                        layout.specs[index].shape, start, stop, piece, offset + start, index in coded
                    )
            elif rows := segment.rows_of(rank):
                spec = layout.specs[segment.index]
                if segment.index in coded:
                    parts.append(HeldPart(piece, 0, (rows, *spec.row_shape), spec.inverse, True))
                else:
                    parts.append(HeldPart(piece, 0, (rows * segment.row,), (0,), False))
        if holdings and holdings[-1].parts == tuple(parts):
            holdings[-1] = Holding(holdings[-1].first, rank + 1, holdings[-1].parts)
        else:
            holdings.append(Holding(rank, rank + 1, tuple(parts)))
    return tuple(holdings)


def _ranges(
    shape: tuple[int, ...], start: int, stop: int, piece: int, offset: int, coded: bool
) -> list[HeldPart]:
    """The elements [start, stop) of a parameter: whole rows, if ``coded``. ``offset``: their place in the chunk.

    They are the end of one matrix, whole matrices, and the beginning of another one; each of these may be missing.
    """
    if start == stop:
        return []
    if not coded:
        return [HeldPart(piece, offset, (stop - start,), (0,), False)]
    rows, columns = shape[-2:]
    first, last = start // columns, stop // columns
    head = min(-first % rows, last - first)
    whole, tail = divmod(last - first - head, rows)
    parts: list[HeldPart] = []
    for shape_here in ((1, head, columns), (whole, rows, columns), (1, tail, columns)):
        if numel := math.prod(shape_here):
            parts.append(HeldPart(piece, offset, shape_here, (0, 1, 2), True))
            offset += numel
    return parts


def cut_in_a_block(layout: UnitLayout, coded: Collection[int], block: BlockShape) -> tuple[int, str] | None:
    """The first coded parameter of which ranks would hold parts of one block, and the place; None if there is none."""
    for segment in (s for run in layout.runs if not run.extended for s in run.segments):
        if isinstance(segment, RaggedSegment):
            for member in segment.members:
                ranges = (segment.range_of(member, rank) for rank in range(layout.world_size))
                cuts = [stop for start, stop in ranges if start < stop < member.numel]
                places = (_cut_of(layout.specs[member.index].shape, at, block) for at in cuts)
                if member.index in coded and (place := next(filter(None, places), None)):
                    return member.index, place
        elif segment.index in coded:
            spec = layout.specs[segment.index]
            if place := _cut_along(spec.dim, spec.shape, segment, block):
                return segment.index, place
    return None


def _cut_of(shape: tuple[int, ...], at: int, block: BlockShape) -> str | None:
    """The place of a cut before element ``at`` in memory order, if that is inside a block."""
    rows, columns = shape[-2:]
    row, column = divmod(at, columns)
    if column:
        return f"inside row {row % rows}"
    return f"before row {row % rows}" if row % rows % block[0] else None


def _cut_along(dim: int, shape: tuple[int, ...], segment: Segment, block: BlockShape) -> str | None:
    """The place of the first cut along a dimension, if that is inside a block."""
    step = {len(shape) - 2: block[0], len(shape) - 1: block[1]}.get(dim, 1)
    if segment.rows >= segment.size or segment.rows % step == 0:
        return None
    return f"before {'row' if dim == len(shape) - 2 else 'column'} {segment.rows}"


def granule_of_blocks(specs: Sequence[TensorSpec], coded: Collection[int], block: BlockShape) -> int:
    """The k of ``Ragged(k)`` that cuts no block of the coded parameters, in rows.

    Granules are counted over the whole stack. If the rows of a matrix are not whole blocks, matrices must stay whole.
    """
    rows = [1]
    for i in coded:
        matrix = specs[i].shape[-2]
        is_stack = math.prod(specs[i].shape[:-2]) > 1
        rows.append(matrix if is_stack and matrix % block[0] else block[0])
    return math.lcm(*rows)
