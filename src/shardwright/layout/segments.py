"""Where every element of a unit lives: segments, runs, and the rank-major packing of gradients.

Pure planning on shapes and dtypes: no tensor is made, no process group is asked, so it is tested without either.
Offsets and lengths are in elements unless a name says bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 16  #: bytes on which every parameter and every local chunk starts


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def alignment_elements(*dtypes: torch.dtype) -> int:
    """Elements that make 16 bytes in the smallest of the dtypes, so one offset serves them all."""
    return ALIGNMENT // min(dtype.itemsize for dtype in dtypes)


@dataclass(frozen=True)
class TensorSpec:
    """What the planner knows of a parameter: its name, global shape, dtypes, and the dimension it is cut along.

    A 0-d parameter has no dimension to cut: every rank keeps it whole.
    """

    name: str
    shape: tuple[int, ...]
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    dim: int = 0
    #: Dimensions from the outermost in memory to the innermost; ``dim`` comes first. Default: in their own order.
    order: tuple[int, ...] = ()
    #: Whether its tensor decides what is gathered of it, so that it has no place in the shard and the slab.
    extended: bool = False

    def __post_init__(self) -> None:
        if self.shape and not 0 <= self.dim < len(self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} has no dimension {self.dim}")
        natural = (self.dim, *(d for d in range(len(self.shape)) if d != self.dim)) if self.shape else ()
        if not self.order:
            object.__setattr__(self, "order", natural)
        elif sorted(self.order) != sorted(natural) or self.order[0] != self.dim:
            raise ValueError(
                f"{self.name}: {self.order} is no order of dimensions that begins with {self.dim}"
            )

    @property
    def replicated(self) -> bool:
        """Whether every rank keeps the whole parameter."""
        return not self.shape

    @property
    def is_natural(self) -> bool:
        """Whether memory order is the order of the dimensions."""
        return self.order == tuple(range(len(self.shape)))

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row of the sharded dimension, as it lies in memory."""
        return tuple(self.shape[d] for d in self.order[1:])

    @property
    def inverse(self) -> tuple[int, ...]:
        """The permutation that takes memory order back to the order of the dimensions."""
        return tuple(self.order.index(d) for d in range(len(self.order)))

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the global tensor: as it lies in memory if rows are outermost anyway, else contiguous."""
        order = self.order if self.dim == 0 else tuple(range(len(self.shape)))
        strides, step = [0] * len(self.shape), 1
        for d in reversed(order):
            strides[d] = step
            step *= max(self.shape[d], 1)
        return tuple(strides)


@dataclass(frozen=True)
class Segment:
    """One parameter's place: ``chunk`` elements per rank in the shard, ``world_size * chunk`` in the slab.

    The sharded dimension lies outermost; ``rows`` of it belong to each rank (the last ranks may hold fewer, or none,
    and the rest is zero padding). A replicated parameter is a segment of one row per rank, all rows equal.
    """

    index: int
    size: int  #: length of the sharded dimension
    row: int  #: elements per row
    rows: int  #: rows per rank, padded
    slab_offset: int
    shard_offset: int  #: where the cast of this rank's chunk lies, and its gradient

    @property
    def chunk(self) -> int:
        return self.rows * self.row

    def rows_of(self, rank: int) -> int:
        """Rows that ``rank`` really owns, without padding."""
        return max(0, min(self.rows, self.size - rank * self.rows))


@dataclass(frozen=True)
class Run:
    """Segments of one storage dtype and one compute dtype: cast together, in one call. Or of extended parameters.

    Element offsets count from the start of the run, which lies at ``slab_bytes`` in the slab.
    """

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    segments: tuple[Segment, ...]
    shard_numel: int
    slab_numel: int
    slab_bytes: int
    extended: bool = False

    @property
    def is_cast(self) -> bool:
        return self.storage_dtype != self.compute_dtype and not self.extended


@dataclass(frozen=True)
class UnitLayout:
    """The layout of one unit: its runs, and the bytes of its slab."""

    world_size: int
    specs: tuple[TensorSpec, ...]
    runs: tuple[Run, ...]
    slab_nbytes: int


def plan_unit(specs: Sequence[TensorSpec], world_size: int) -> UnitLayout:
    """Lay out parameters whole and contiguous, each cut into ``world_size`` chunks of ``ceil(size / world_size)`` rows.

    Chunks follow :func:`torch.chunk`, which is what ``Shard`` of DTensor means.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, expected at least 1")
    order: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for i, spec in enumerate(specs):
        order.setdefault((spec.storage_dtype, spec.compute_dtype, spec.extended), []).append(i)
    runs: list[Run] = []
    slab_bytes = 0
    for (storage, compute, extended), indices in order.items():
        align = alignment_elements(storage, compute)
        shard = slab = 0
        segments = []
        for i in indices:
            spec = specs[i]
            if spec.replicated:
                size, row = world_size, 1
            else:
                size, row = spec.shape[spec.dim], math.prod(spec.row_shape)
            segment = Segment(i, size, row, -(-size // world_size), slab, shard)
            segments.append(segment)
            shard += round_up(segment.chunk, align)
            slab += round_up(segment.chunk * world_size, align)
        if extended:
            shard = slab = 0
        runs.append(Run(storage, compute, tuple(segments), shard, slab, slab_bytes, extended))
        slab_bytes = round_up(slab_bytes + slab * compute.itemsize, ALIGNMENT)
    return UnitLayout(world_size, tuple(specs), tuple(runs), slab_bytes)


@dataclass(frozen=True)
class GradientPart:
    """One parameter in a packed reduction: ``chunk`` elements per rank from ``offset``, then ``gap`` zeros."""

    index: int
    offset: int
    chunk: int
    gap: int
    span: int  #: which of the packing's spans it lies in


@dataclass(frozen=True)
class Span:
    """A stretch of a reduction whose parameters are stored in one dtype; one cast call fills its gradients."""

    storage_dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True)
class Packing:
    """One reduce-scatter: the gradients of one reduce dtype, rank-major, and behind them one flag per parameter.

    A flag says whether this rank has a gradient for the parameter. Summed over the ranks it tells a parameter that
    nobody used (its gradient stays ``None``) from one that only this rank did not use (zeros count here).
    """

    reduce_dtype: torch.dtype
    parts: tuple[GradientPart, ...]
    spans: tuple[Span, ...]
    flags: int  #: offset of the flags
    numel: int  #: elements per rank, flags and padding included

    @property
    def flag_slots(self) -> int:
        return self.numel - self.flags


def plan_packing(
    layout: UnitLayout, trainable: Sequence[bool], reduce_dtypes: Sequence[torch.dtype]
) -> tuple[Packing, ...]:
    """Pack the gradients of the trainable parameters: one packing per reduce dtype, in the order of the shard."""
    packings = []
    for reduce_dtype in dict.fromkeys(reduce_dtypes):
        offset = 0
        parts: list[GradientPart] = []
        spans: list[Span] = []
        for run in layout.runs:
            start = offset
            align = alignment_elements(reduce_dtype, run.storage_dtype, run.compute_dtype)
            for s in run.segments:
                if not trainable[s.index] or reduce_dtypes[s.index] != reduce_dtype:
                    continue
                gap = (
                    round_up(max(s.chunk, 1), align) - s.chunk
                )  # a parameter without elements has a flag, too
                parts.append(GradientPart(s.index, offset, s.chunk, gap, len(spans)))
                offset += s.chunk + gap
            if offset > start:
                spans.append(Span(run.storage_dtype, start, offset))
        if parts:
            flags = round_up(len(parts), ALIGNMENT // reduce_dtype.itemsize)
            packings.append(Packing(reduce_dtype, tuple(parts), tuple(spans), offset, offset + flags))
    return tuple(packings)
