"""The cut of one parameter over the ranks: this rank's part, and the sharded form.

There are two kinds: rows along a dimension, as with DTensor's ``Shard``, and a range of elements with any ends. The
rest of the engine uses a :class:`Cut` of either kind.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from shardwright.engine.compat.dtensor import dtensor_of, local_of
from shardwright.engine.layout import RaggedSegment, Run, Segment, TensorSpec
from shardwright.engine.memory import Slab
from shardwright.engine.tensors.gathering import full_of
from shardwright.engine.tensors.ragged import tensor as ragged
from shardwright.engine.tensors.ragged.spec import RaggedSpec
from shardwright.engine.tensors.ragged.tensor import RaggedTensor
from shardwright.engine.tensors.ranks import Ranks
from shardwright.engine.tensors.rows.tensor import as_sharded
from shardwright.engine.tensors.tensor_parallel import TensorParallel


class Cut(Protocol):
    spec: TensorSpec  #: of the tensor that is cut: for tensor parallelism this rank's part
    parallel: TensorParallel | None
    shape: torch.Size  #: of the whole parameter

    def wrap(self, local: torch.Tensor) -> Any:
        """Return ``local`` as the sharded tensor of the parameter's ``shape``, without any communication."""

    def part_of(self, source: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``source``, whole or sharded.

        Communicates only if ``source`` is sharded in another way.
        """

    def of_full(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that is full on this rank, as a view."""

    def local_view(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        """Return this rank's part as a view of its flat shard, whose segment begins at ``offset``."""

    def packed_view(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the same part as a view of gathered or reduced memory, in which its segment begins at ``offset``."""

    @property
    def repacks(self) -> bool:
        """Whether the shard has another order of elements than gathered and reduced memory."""

    def full_view(self, slab: Slab, run: Run) -> torch.Tensor:
        """Return the full parameter as a view of the slab."""

    def pieces(self, local: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Return this rank's part as boxes of the whole: each box's start, and its memory as a view of ``local``."""


class RowCut:
    """Cuts rows of one dimension as ``torch.chunk`` does; a 0-d parameter stays whole. The form is a DTensor."""

    def __init__(
        self, ranks: Ranks, spec: TensorSpec, parallel: TensorParallel | None, segment: Segment
    ) -> None:
        self.spec, self.parallel = spec, parallel
        placements = ranks.placements(None if spec.replicated else spec.dim)
        if parallel is None:
            self.shape, self._stride = torch.Size(spec.shape), spec.stride
            self._mesh, self._placements = ranks.mesh, placements
        else:
            self.shape, self._stride = parallel.shape, parallel.stride
            self._mesh, self._placements = parallel.rest, parallel.at_rest(placements)
        self._rows = min(ranks.part * segment.rows, segment.size), segment.rows_of(ranks.part)
        self._slab_offset = segment.slab_offset

    def wrap(self, local: torch.Tensor) -> DTensor:
        return as_sharded(dtensor_of(local, self._mesh, self._placements, self.shape, self._stride))

    def part_of(self, source: torch.Tensor) -> torch.Tensor:
        source = source.detach()
        if isinstance(source, DTensor):
            if source.device_mesh == self._mesh and source.placements == self._placements:
                return local_of(source)
            if self.parallel is None:
                source = full_of(source)
        elif isinstance(source, RaggedTensor):
            source = source.full_tensor()
        return self.of_full(source if self.parallel is None else self.parallel.part_of(source))

    def of_full(self, full: torch.Tensor) -> torch.Tensor:
        return full if self.spec.replicated else full.narrow(self.spec.dim, *self._rows)

    def local_view(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        if not self.repacks:
            return self.packed_view(flat, offset)
        shape = list(self.spec.shape)
        shape[self.spec.dim] = self._rows[1]
        return flat[offset : offset + math.prod(shape)].view(shape)

    def packed_view(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        spec = self.spec
        if spec.replicated:
            return flat[offset : offset + 1].view(())
        rows = self._rows[1]
        view = flat[offset : offset + rows * math.prod(spec.row_shape)].view(rows, *spec.row_shape)
        return view if spec.is_natural else view.permute(spec.inverse)

    @property
    def repacks(self) -> bool:
        return self.spec.dim != 0  # the shard is contiguous, and in the slab its dimension is outermost

    def full_view(self, slab: Slab, run: Run) -> torch.Tensor:
        spec, dtype = self.spec, run.compute_dtype
        offset = run.slab_bytes // dtype.itemsize + self._slab_offset
        if spec.replicated:
            return slab.view(dtype, offset, (), ())
        view = slab.view(dtype, offset, (spec.shape[spec.dim], *spec.row_shape))
        return view if spec.is_natural else view.permute(spec.inverse)

    def pieces(self, local: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        first, rows = self._rows
        if not self.spec.replicated and not rows:
            return []
        start = self.parallel.box[0] if self.parallel is not None else (0,) * local.ndim
        return [(tuple(at + first if d == self.spec.dim else at for d, at in enumerate(start)), local)]


class RaggedCut:
    """Cuts a range of elements in memory order. The form is a RaggedTensor."""

    def __init__(
        self,
        ranks: Ranks,
        spec: TensorSpec,
        parallel: TensorParallel | None,
        chunk: int,
        offset: int,
        slab_offset: int,
    ) -> None:
        self.spec, self.parallel = spec, parallel
        self.shape = parallel.shape if parallel is not None else torch.Size(spec.shape)
        if spec.replicated:  # each rank's chunk holds it
            self._ragged = RaggedSpec(torch.Size(), 0, 1, ranks.mesh, axes=(), parallel=parallel)
            self._range, self._behind = (0, 1), offset
        else:
            self._ragged = RaggedSpec(
                torch.Size(spec.shape), offset, chunk, ranks.mesh, axes=ranks.axes, parallel=parallel
            )
            start, stop = self._ragged.range_of(ranks.part)
            self._range = start, stop
            self._behind = max(offset - ranks.part * chunk, 0) if stop > start else 0
        self._slab_offset = slab_offset

    def wrap(self, local: torch.Tensor) -> RaggedTensor:
        return RaggedTensor(local, self._ragged)

    def part_of(self, source: torch.Tensor) -> torch.Tensor:
        return ragged.part_of(source, self._ragged)

    def of_full(self, full: torch.Tensor) -> torch.Tensor:
        start, stop = self._range
        return full.reshape(-1)[start:stop].view(self._ragged.local_shape(self._ragged.rank))

    def local_view(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        start, stop = self._range
        offset += self._behind
        return flat[offset : offset + stop - start].view(self._ragged.local_shape(self._ragged.rank))

    def packed_view(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        return self.local_view(flat, offset)

    @property
    def repacks(self) -> bool:
        return False

    def full_view(self, slab: Slab, run: Run) -> torch.Tensor:
        offset = run.slab_bytes // run.compute_dtype.itemsize + self._slab_offset
        return slab.view(run.compute_dtype, offset, self.spec.shape)

    def pieces(self, local: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        flat, sizes = local.view(-1), [box[1] for box in self._ragged.boxes]
        parts = flat.split([size.numel() for size in sizes])
        return [
            (tuple(offsets), part.view(size))
            for (offsets, size), part in zip(self._ragged.boxes, parts, strict=True)
            if size.numel()
        ]


def make_cut(
    ranks: Ranks,
    spec: TensorSpec,
    parallel: TensorParallel | None,
    segment: Segment | RaggedSegment,
    member: Any,
) -> Cut:
    """Return the cut of a parameter that is a ``member`` of this segment."""
    chunk = max(segment.chunk, 1)  # 0 where all members are empty
    if isinstance(segment, RaggedSegment):
        offset = member.offset
        return RaggedCut(ranks, spec, parallel, chunk, offset, segment.slab_offset + offset)
    if len(ranks.axes) > 1:  # no DTensor can express that the inner axis cuts first
        return RaggedCut(ranks, spec, parallel, chunk, 0, segment.slab_offset)
    return RowCut(ranks, spec, parallel, segment)


def cut_alone(ranks: Ranks, spec: TensorSpec, parallel: TensorParallel | None, like: Cut) -> Cut:
    """Return a cut like ``like`` for another shape or dtype, which serves until the unit's memory is made again."""
    if isinstance(like, RaggedCut):
        numel = math.prod(spec.shape)
        return RaggedCut(ranks, spec, parallel, max(-(-numel // ranks.parts), 1), 0, 0)
    size = spec.shape[spec.dim] if spec.shape else ranks.parts
    segment = Segment(0, size, math.prod(spec.row_shape), -(-size // ranks.parts), 0, 0)
    return RowCut(ranks, spec, parallel, segment)
