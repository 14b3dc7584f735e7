"""Encoded gathers of any layout on any number of ranks, without process groups: rows are put together by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from shardwright.engine.comm import MXFP8, BlockCoding, BlockwiseFP8
from shardwright.engine.layout import Ragged, RaggedSegment, TensorSpec, UnitLayout, plan_unit
from shardwright.engine.layout.blocks import cut_in_a_block, granule_of_blocks, plan_holdings

FP32 = torch.float32


@st.composite
def shapes(draw: st.DrawFn) -> list[tuple[int, ...]]:
    sizes = st.integers(0, 9)
    last = st.sampled_from([1, 5, 12, 31, 32, 40, 64, 70])
    made = []
    for _ in range(draw(st.integers(1, 5))):
        stack = draw(st.lists(sizes, max_size=3))
        made.append((*stack, draw(last)) if stack else draw(st.sampled_from([(), (7,), (300,)])))
    return made


def specs_of(shapes: list[tuple[int, ...]], orders: list[tuple[int, ...]] | None = None) -> list[TensorSpec]:
    return [
        TensorSpec(f"p{i}", shape, FP32, FP32, order[0] if order else 0, order)
        for i, shape in enumerate(shapes)
        for order in [orders[i] if orders else ()]
    ]


def in_segments(layout: UnitLayout, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The elements of all ranks' chunks, segment by segment."""
    made = []
    for s in (s for run in layout.runs for s in run.segments if s.chunk):
        buffer = torch.full((layout.world_size, s.chunk), -1.0)
        for m in s.members:
            spec, value = layout.specs[m.index], values[m.index]
            if spec.replicated:
                at = m.offset if isinstance(s, RaggedSegment) else 0
                buffer[:, at] = value
            else:
                at = m.offset if isinstance(s, RaggedSegment) else 0
                buffer.view(-1)[at : at + value.numel()] = value.permute(spec.order).reshape(-1)
        made.append(buffer)
    return made


def check(layout: UnitLayout, coded: list[int], codec: Any, two_hops: bool) -> None:
    values = [torch.randn(s.shape) for s in layout.specs]
    chunks = in_segments(layout, values)
    holdings = plan_holdings(layout, coded)
    assert [h.first for h in holdings] + [layout.world_size] == [0] + [h.stop for h in holdings]
    codings = [BlockCoding(codec, holdings, [FP32] * len(chunks), r) for r in range(layout.world_size)]
    header = torch.zeros(4, dtype=torch.uint8)
    rows = []
    for rank, coding in enumerate(codings):
        sent = coding.encode([*(c[rank].view(torch.uint8) for c in chunks), header])
        rows.append(torch.cat(sent))
        assert len(rows[-1]) == coding.nbytes + 4
    arrived = torch.stack(rows)
    if two_hops:  # the headers are only in the last gather
        inner = arrived[:, :-4].reshape(layout.world_size // 2, -1)
        arrived = torch.cat((inner, torch.zeros(len(inner), 4, dtype=torch.uint8)), 1)
    outputs = [torch.full((c.numel() * 4,), 255, dtype=torch.uint8) for c in chunks]
    headers = torch.ones(4 * len(arrived), dtype=torch.uint8)
    codings[0].decode(arrived, [*outputs, headers])
    assert not headers.any()
    expected = list(values)
    for i in coded:
        if values[i].numel():
            matrices = values[i].reshape(-1, *values[i].shape[-2:])
            whole = codec.decode(codec.encode(matrices), *matrices.shape[1:])
            expected[i] = whole.view(values[i].shape)
    for found, buffer in zip(outputs, in_segments(layout, expected), strict=True):
        there = buffer != -1.0
        assert torch.equal(found.view(FP32).view(layout.world_size, -1)[there], buffer[there])


@settings(deadline=None, max_examples=150)
@given(shapes(), st.integers(1, 8), st.sampled_from([2, 3, 4, 32]), st.data())
def test_decoded_weights_are_those_of_whole_tensors(
    sizes: list[tuple[int, ...]], world_size: int, block: int, data: st.DataObject
) -> None:
    """On any layout that cuts no block. A layout of the suggested granules never does."""
    codec: Any = MXFP8() if block == 32 else BlockwiseFP8(block)
    orders = [tuple(data.draw(st.permutations(range(len(shape))))) for shape in sizes]
    coded = [i for i, shape in enumerate(sizes) if len(shape) > 1 and data.draw(st.booleans())]
    kind = data.draw(st.sampled_from(["per parameter", "row", "element", 2, 3, 8, "suggested"]))
    specs = specs_of(sizes, orders if kind == "per parameter" else None)
    if kind == "suggested":
        kind = granule_of_blocks(specs, coded, codec.block_shape)
        layout = plan_unit(specs, world_size, Ragged(kind))
        assert cut_in_a_block(layout, coded, codec.block_shape) is None
    else:
        layout = plan_unit(specs, world_size, None if kind == "per parameter" else Ragged(kind))
    if cut_in_a_block(layout, coded, codec.block_shape) is None:
        check(layout, coded, codec, two_hops=world_size % 2 == 0 and data.draw(st.booleans()))


@pytest.mark.parametrize(
    ("shape", "dim", "layout", "world_size", "place"),
    [
        ((256, 8), 0, None, 2, None),
        ((256, 8), 0, None, 3, "before row 86"),
        ((256, 8), 0, None, 1, None),
        ((4, 100, 8), 0, None, 4, None),
        ((4, 100, 8), 1, None, 2, "before row 50"),
        ((8, 256), 1, None, 2, None),
        ((8, 200), 1, None, 2, "before column 100"),
        ((300, 8), 0, Ragged(128), 2, None),
        ((300, 8), 0, Ragged("row"), 2, "before row 150"),
        ((301, 9), 0, Ragged("element"), 2, "inside row 150"),
        ((4, 100, 8), 0, Ragged(128), 2, "before row 56"),
        ((4, 100, 8), 0, Ragged(100), 2, None),
    ],
)
def test_places_where_layouts_cut_blocks(
    shape: tuple[int, ...], dim: int, layout: Ragged | None, world_size: int, place: str | None
) -> None:
    spec = TensorSpec("p", shape, FP32, FP32, dim)
    found = cut_in_a_block(plan_unit([spec], world_size, layout), [0], (128, 128))
    assert found == (None if place is None else (0, place))
    assert cut_in_a_block(plan_unit([spec], world_size, layout), [], (128, 128)) is None


def test_granules_of_blocks() -> None:
    def granule(*shapes: tuple[int, ...], block: tuple[int, int] = (128, 128)) -> int:
        return granule_of_blocks(specs_of(list(shapes)), range(len(shapes)), block)

    assert granule((500, 8), (7, 8)) == 128
    assert granule((1, 500, 8)) == 128
    assert granule((3, 256, 8)) == 128
    assert granule((3, 200, 8)) == 200
    assert granule((3, 200, 8), (500, 8)) == math.lcm(200, 128)
    assert granule((3, 200, 8), (500, 8), block=(1, 32)) == 1


def test_many_ranks_are_few_holdings() -> None:
    """A decoder call for each kind of part, not for each rank."""
    for layout in (None, Ragged("row"), Ragged(128)):
        specs = specs_of([(128 * 4096, 64), (128 * 1024, 64), (999, 64)])
        unit = plan_unit(specs, 1024, layout)
        assert len(plan_holdings(unit, [0, 1, 2])) <= 8


@pytest.mark.parametrize("shape", [(4, 5, 12), (2, 2, 5, 12)])
def test_a_cut_inside_a_matrix_of_a_stack(shape: tuple[int, ...]) -> None:
    """Ranks begin with the end of a matrix, whose blocks are not counted on into the next matrix."""
    layout = plan_unit(specs_of([shape]), 2, Ragged(4))
    assert cut_in_a_block(layout, [0], (2, 2)) is None
    starts = {part.own_shape for holding in plan_holdings(layout, [0]) for part in holding.parts}
    assert (1, 3, 12) in starts
    check(layout, [0], BlockwiseFP8(2), two_hops=False)
