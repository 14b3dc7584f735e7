"""Where every element of a unit lives: its segments in runs of equal dtypes, and the packing of its gradients.

Pure, as all planning here. Offsets and lengths are in elements unless a name says bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shardwright.layout.planner import Ragged, plan
from shardwright.layout.planner import Segment as RaggedSegment
from shardwright.layout.segments import ALIGNMENT, Segment, TensorSpec, alignment_elements, round_up


@dataclass(frozen=True)
class Run:
    """Segments of one storage dtype and one compute dtype: cast together, in one call. Or of extended parameters.

    Element offsets count from the start of the run, which lies at ``slab_bytes`` in the slab.
    """

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    segments: tuple[Segment | RaggedSegment, ...]
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


def plan_unit(
    specs: Sequence[TensorSpec],
    world_size: int,
    ragged: Ragged | None = None,
    groups: Sequence[object] | None = None,
) -> UnitLayout:
    """Lay out parameters, each whole and contiguous in the slab, for ``world_size`` shards.

    Without ``ragged`` each is cut into chunks of ``ceil(size / world_size)`` rows, which follow :func:`torch.chunk`, as
    ``Shard`` of DTensor means it. With it they share segments, those of equal ``groups`` only; extended parameters are
    cut in rows all the same.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, expected at least 1")
    order: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for i, spec in enumerate(specs):
        order.setdefault((spec.storage_dtype, spec.compute_dtype, spec.extended), []).append(i)
    runs: list[Run] = []
    slab_bytes = 0
    for (storage, compute, extended), indices in order.items():
        segments: Sequence[Segment | RaggedSegment]
        if ragged is None or extended:
            segments, shard, slab = _in_rows(specs, indices, world_size, alignment_elements(storage, compute))
        else:
            shared = plan(
                [specs[i].shape for i in indices],
                world_size,
                ragged,
                dtypes=[(storage, compute)] * len(indices),
                groups=[groups[i] if groups is not None else None for i in indices],  # type: ignore[misc]
            )
            segments, shard, slab = _numbered(shared.segments, indices), shared.shard_numel, shared.numel
        if extended:
            shard = slab = 0
        runs.append(Run(storage, compute, tuple(segments), shard, slab, slab_bytes, extended))
        slab_bytes = round_up(slab_bytes + slab * compute.itemsize, ALIGNMENT)
    return UnitLayout(world_size, tuple(specs), tuple(runs), slab_bytes)


def _in_rows(
    specs: Sequence[TensorSpec], indices: Sequence[int], world_size: int, align: int
) -> tuple[list[Segment], int, int]:
    segments = []
    shard = slab = 0
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
    return segments, shard, slab


def _numbered(segments: Sequence[RaggedSegment], indices: Sequence[int]) -> list[RaggedSegment]:
    """Segments that were planned for some parameters of a unit, with the unit's numbers."""
    return [
        replace(s, members=tuple(replace(m, index=indices[m.index]) for m in s.members)) for s in segments
    ]


@dataclass(frozen=True)
class GradientPart:
    """A parameter in a packed reduction: its segment has ``chunk`` elements per rank from ``offset``, then ``gap``."""

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
    """One reduction: the gradients of one reduce dtype, and behind them one flag per parameter.

    A flag says whether this rank has a gradient for the parameter. Summed over the ranks it tells a parameter that
    nobody used (its gradient stays ``None``) from one that only this rank did not use (zeros count here).

    Parameters cut in rows are packed rank-major, every rank's part together, and reduced as one tensor. Segments that
    parameters share are packed one after another, each whole as in the slab, and reduced by one coalesced collective.
    """

    reduce_dtype: torch.dtype
    parts: tuple[GradientPart, ...]
    spans: tuple[Span, ...]
    flags: int  #: offset of the flags
    numel: int  #: elements per rank, flags and padding included
    shared: tuple[RaggedSegment, ...] = ()  #: the segments, if parameters share them

    @property
    def flag_slots(self) -> int:
        return self.numel - self.flags

    @property
    def chunks(self) -> tuple[int, ...]:
        """Elements per rank of each tensor that is reduced."""
        return (*(s.chunk for s in self.shared), self.flag_slots) if self.shared else (self.numel,)


def plan_packing(
    layout: UnitLayout, trainable: Sequence[bool], reduce_dtypes: Sequence[torch.dtype]
) -> tuple[Packing, ...]:
    """Pack the gradients of the trainable parameters, in the order of the shard.

    One packing per reduce dtype, and one more for what is cut otherwise.
    """
    packings = []
    shares = [any(isinstance(s, RaggedSegment) for s in run.segments) for run in layout.runs]
    for reduce_dtype in dict.fromkeys(reduce_dtypes):
        for shared in dict.fromkeys(shares):
            runs = [run for run, here in zip(layout.runs, shares, strict=True) if here == shared]
            packing = _plan_packing(runs, shared, trainable, reduce_dtypes, reduce_dtype)
            if packing is not None:
                packings.append(packing)
    return tuple(packings)


def _plan_packing(
    runs: Sequence[Run],
    shared: bool,
    trainable: Sequence[bool],
    reduce_dtypes: Sequence[torch.dtype],
    reduce_dtype: torch.dtype,
) -> Packing | None:
    offset = 0
    parts: list[GradientPart] = []
    spans: list[Span] = []
    segments: list[RaggedSegment] = []
    for run in runs:
        start = offset
        align = alignment_elements(reduce_dtype, run.storage_dtype, run.compute_dtype)
        for s in run.segments:
            wanted = [m for m in s.members if trainable[m.index] and reduce_dtypes[m.index] == reduce_dtype]
            if not wanted:
                continue
            # A parameter without elements has a flag, too, so it has a place.
            gap = 0 if isinstance(s, RaggedSegment) else round_up(max(s.chunk, 1), align) - s.chunk
            parts += [GradientPart(m.index, offset, s.chunk, gap, len(spans)) for m in wanted]
            if isinstance(s, RaggedSegment):
                segments.append(s)
            offset += s.chunk + gap
        if offset > start:
            spans.append(Span(run.storage_dtype, start, offset))
    if not parts:
        return None
    flags = round_up(len(parts), ALIGNMENT // reduce_dtype.itemsize)
    return Packing(reduce_dtype, tuple(parts), tuple(spans), offset, offset + flags, tuple(segments))
