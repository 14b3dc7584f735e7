"""The place of every element of a unit: its segments in runs of equal dtypes, and the packing of its gradients.

Pure, as all planning here. Offsets and lengths are in elements unless a name says bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from shardwright.engine.layout.planner import Ragged, RaggedSegment, plan
from shardwright.engine.layout.segments import ALIGNMENT, Segment, TensorSpec, alignment_elements, round_up


@dataclass(frozen=True)
class Run:
    """Segments of one storage dtype and one compute dtype, which one call casts; or segments of extended parameters.

    Element offsets count from the start of the run, which begins at ``slab_bytes`` in the slab. A run that is
    ``in_place`` has no place there, because its full parameters are the shard itself.
    """

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    segments: tuple[Segment | RaggedSegment, ...]
    shard_numel: int
    slab_numel: int
    slab_bytes: int
    extended: bool = False
    in_place: bool = False

    @property
    def is_cast(self) -> bool:
        """Whether its parameters are cast before they are gathered."""
        return self.storage_dtype != self.compute_dtype and not self.extended


@dataclass(frozen=True)
class UnitLayout:
    """The layout of one unit: its runs, and the bytes of its slab.

    ``allows_in_place``: whether every run without a cast is in place.
    """

    world_size: int
    specs: tuple[TensorSpec, ...]
    runs: tuple[Run, ...]
    slab_nbytes: int
    allows_in_place: bool = False

    def as_stored(self) -> UnitLayout:
        """The same places in a slab that has the parameters in their storage dtypes."""
        runs: list[Run] = []
        slab_bytes = 0
        for run in self.runs:
            in_place = self.allows_in_place and not run.extended
            slab = 0 if in_place else run.slab_numel
            runs.append(
                replace(
                    run,
                    compute_dtype=run.storage_dtype,
                    slab_numel=slab,
                    slab_bytes=slab_bytes,
                    in_place=in_place,
                )
            )
            slab_bytes = round_up(slab_bytes + slab * run.storage_dtype.itemsize, ALIGNMENT)
        specs = tuple(replace(spec, compute_dtype=spec.storage_dtype) for spec in self.specs)
        return UnitLayout(self.world_size, specs, tuple(runs), slab_bytes, self.allows_in_place)


def plan_unit(
    specs: Sequence[TensorSpec],
    world_size: int,
    ragged: Ragged | None = None,
    groups: Sequence[object] | None = None,
    allows_in_place: bool = False,
) -> UnitLayout:
    """Lay out parameters, each whole and contiguous in the slab, for ``world_size`` shards.

    Without ``ragged`` each is cut into chunks of ``ceil(size / world_size)`` rows, as by :func:`torch.chunk` and
    DTensor's ``Shard``. With ``ragged`` parameters of equal ``groups`` share segments. Extended parameters are always
    cut in rows.

    Args:
        specs: shape, storage dtype and compute dtype of each parameter.
        world_size: ranks among which every parameter is divided.
        ragged: how parameters share segments; None: each has its own segment.
        groups: one for each parameter, anything hashable.
        allows_in_place: parameters that are not cast have no place in the slab. The one rank that has all of them
            computes with its shards.

    Raises:
        ValueError: ``world_size`` is less than 1, or it is more than 1 and ``allows_in_place`` is True.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, expected at least 1")
    if allows_in_place and world_size > 1:
        raise ValueError(
            f"allows_in_place is True with world_size {world_size}, so no rank has all of a parameter"
        )
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
        in_place = allows_in_place and storage == compute and not extended
        if in_place:
            slab = 0
        runs.append(Run(storage, compute, tuple(segments), shard, slab, slab_bytes, extended, in_place))
        slab_bytes = round_up(slab_bytes + slab * compute.itemsize, ALIGNMENT)
    return UnitLayout(world_size, tuple(specs), tuple(runs), slab_bytes, allows_in_place)


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
    """Segments that were planned for some of a unit's parameters, renumbered with the numbers of the unit."""
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
    span: int  #: its span in the packing


@dataclass(frozen=True)
class Span:
    """A range of a reduction whose gradients get one dtype. One call casts them."""

    grad_dtype: torch.dtype
    start: int
    stop: int


class GradientDtypes(NamedTuple):
    """Dtypes of a parameter's gradient: in the reduction, in ``.grad`` (None: as the parameter is stored), and of the
    sums held between micro-batches (None: as in the reduction)."""

    reduce: torch.dtype
    grad: torch.dtype | None = None
    accumulate: torch.dtype | None = None


@dataclass(frozen=True)
class Packing:
    """One reduction: the gradients of equal :class:`GradientDtypes`, and behind them one flag per parameter.

    A flag says whether this rank has a gradient for the parameter. If the flags of all ranks sum to 0, no rank used the
    parameter, and its gradient stays ``None``. Otherwise ranks without a gradient add zeros.

    Parameters cut in rows are packed rank-major, every rank's part together, and reduced as one tensor. Segments that
    parameters share are packed one after another, each whole as in the slab, and reduced by one coalesced collective.
    """

    reduce_dtype: torch.dtype
    parts: tuple[GradientPart, ...]
    spans: tuple[Span, ...]
    flags: int  #: offset of the flags
    numel: int  #: elements per rank, flags and padding included
    shared: tuple[RaggedSegment, ...] = ()  #: the segments, if parameters share them
    accumulate_dtype: torch.dtype | None = None  #: of sums that are held; None: the reduce dtype

    @property
    def held_dtype(self) -> torch.dtype:
        """The dtype of sums that wait for later micro-batches."""
        return self.accumulate_dtype or self.reduce_dtype

    @property
    def flag_slots(self) -> int:
        """Elements behind the gradients: one flag for each parameter, padded."""
        return self.numel - self.flags

    @property
    def chunks(self) -> tuple[int, ...]:
        """Elements per rank of each tensor that is reduced."""
        return (*(s.chunk for s in self.shared), self.flag_slots) if self.shared else (self.numel,)


def plan_packing(
    layout: UnitLayout, trainable: Sequence[bool], dtypes: Sequence[GradientDtypes]
) -> tuple[Packing, ...]:
    """Pack the gradients of the trainable parameters, in the order of the shard.

    There is one packing for each choice of dtypes, and another for parameters that are cut in another way.
    """
    packings = []
    shares = [any(isinstance(s, RaggedSegment) for s in run.segments) for run in layout.runs]
    for chosen in dict.fromkeys(dtypes):
        for shared in dict.fromkeys(shares):
            runs = [run for run, here in zip(layout.runs, shares, strict=True) if here == shared]
            included_runs = [flag and own == chosen for flag, own in zip(trainable, dtypes, strict=True)]
            packing = _plan_packing(runs, included_runs, chosen)
            if packing is not None:
                packings.append(packing)
    return tuple(packings)


def _plan_packing(runs: Sequence[Run], included: Sequence[bool], dtypes: GradientDtypes) -> Packing | None:
    reduce_dtype = dtypes.reduce
    offset = 0
    parts: list[GradientPart] = []
    spans: list[Span] = []
    segments: list[RaggedSegment] = []
    for run in runs:
        start = offset
        grad_dtype = dtypes.grad or run.storage_dtype
        align = alignment_elements(reduce_dtype, grad_dtype, run.compute_dtype)
        for s in run.segments:
            members = [m for m in s.members if included[m.index]]
            if not members:
                continue
            # A parameter without elements has a flag, too, so it has a place.
            gap = 0 if isinstance(s, RaggedSegment) else round_up(max(s.chunk, 1), align) - s.chunk
            parts += [GradientPart(m.index, offset, s.chunk, gap, len(spans)) for m in members]
            if isinstance(s, RaggedSegment):
                segments.append(s)
            offset += s.chunk + gap
        if parts and parts[-1].span == len(spans):  # also if none of them has an element
            spans.append(Span(grad_dtype, start, offset))
    if not parts:
        return None
    flags = round_up(len(parts), ALIGNMENT // reduce_dtype.itemsize)
    return Packing(
        reduce_dtype,
        tuple(parts),
        tuple(spans),
        offset,
        offset + flags,
        tuple(segments),
        dtypes.accumulate,
    )
