"""Layouts on any shapes: nothing overlaps, nothing is lost, everything is aligned."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from shardwright.engine.layout import ALIGNMENT, GradientDtypes, TensorSpec, plan_packing, plan_unit

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    made = []
    for i in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        storage, compute = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
        order = tuple(draw(st.permutations(range(len(shape)))))
        made.append(TensorSpec(f"p{i}", shape, storage, compute, order[0] if order else 0, order))
    return made


@settings(deadline=None)
@given(specs(), st.integers(1, 9))
def test_segments_cover_every_parameter_without_overlap(
    parameters: list[TensorSpec], world_size: int
) -> None:
    layout = plan_unit(parameters, world_size)
    seen = set()
    slab_end = 0
    for run in layout.runs:
        assert run.slab_bytes >= slab_end
        shard = slab = 0
        for s in run.segments:
            spec = parameters[s.index]
            seen.add(s.index)
            assert (spec.storage_dtype, spec.compute_dtype) == (run.storage_dtype, run.compute_dtype)
            assert s.shard_offset >= shard and s.slab_offset >= slab
            assert s.shard_offset * run.storage_dtype.itemsize % ALIGNMENT == 0
            assert (run.slab_bytes + s.slab_offset * run.compute_dtype.itemsize) % ALIGNMENT == 0
            assert s.chunk * world_size >= math.prod(spec.shape)
            copies = world_size if spec.replicated else 1
            assert sum(s.rows_of(r) for r in range(world_size)) * s.row == copies * math.prod(spec.shape)
            shard, slab = s.shard_offset + s.chunk, s.slab_offset + s.chunk * world_size
        assert shard <= run.shard_numel and slab <= run.slab_numel
        slab_end = run.slab_bytes + run.slab_numel * run.compute_dtype.itemsize
    assert seen == set(range(len(parameters)))
    assert slab_end <= layout.slab_nbytes


@settings(deadline=None)
@given(specs(), st.integers(1, 9), st.data())
def test_packings_hold_each_trainable_gradient_once(
    parameters: list[TensorSpec], world_size: int, data: st.DataObject
) -> None:
    layout = plan_unit(parameters, world_size)
    trainable = [data.draw(st.booleans()) for _ in parameters]
    reduce = [data.draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in parameters]
    packings = plan_packing(layout, trainable, [GradientDtypes(t) for t in reduce])
    assert len({p.reduce_dtype for p in packings}) == len(packings)
    assert sorted(q.index for p in packings for q in p.parts) == [i for i, t in enumerate(trainable) if t]
    for packing in packings:
        end = 0
        for part in packing.parts:
            span = packing.spans[part.span]
            assert part.offset == end and span.start <= part.offset < span.stop
            assert reduce[part.index] == packing.reduce_dtype
            assert span.grad_dtype == parameters[part.index].storage_dtype
            assert (part.offset - span.start) * span.grad_dtype.itemsize % ALIGNMENT == 0
            end = part.offset + part.chunk + part.gap
        assert packing.flags == end and packing.flag_slots >= len(packing.parts)


def test_a_rank_owns_what_torch_chunk_gives_it() -> None:
    for size in range(1, 12):
        for world_size in range(1, 7):
            segment = (
                plan_unit([TensorSpec("p", (size, 3), torch.float32, torch.float32)], world_size)
                .runs[0]
                .segments[0]
            )
            chunks = [c.shape[0] for c in torch.empty(size, 3).chunk(world_size)]
            assert [segment.rows_of(r) for r in range(world_size)] == chunks + [0] * (
                world_size - len(chunks)
            )


def test_one_dtype_pair_is_one_run() -> None:
    specs = [TensorSpec(f"p{i}", (4, 4), torch.float32, torch.bfloat16) for i in range(5)]
    assert len(plan_unit(specs, 4).runs) == 1


def test_bad_specs_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"scale: \(0, 1\) is no order of dimensions that begins with 1"):
        TensorSpec("scale", (2, 2), torch.float32, torch.float32, 1, (0, 1))
    with pytest.raises(ValueError, match=r"weight: shape \(2, 3\) has no dimension 2"):
        TensorSpec("weight", (2, 3), torch.float32, torch.float32, 2)
    with pytest.raises(ValueError, match="world_size is 0"):
        plan_unit([], 0)
