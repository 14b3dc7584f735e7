"""The planner on any shapes, dtypes and numbers of ranks: nothing lost, nothing cut, everything aligned."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from shardwright.engine.layout import (
    ALIGNMENT,
    Layout,
    Member,
    Ragged,
    RaggedSegment,
    TensorSpec,
    plan,
    plan_unit,
)

KINDS: list[str | Ragged] = [
    "per_parameter",
    Ragged("row"),
    Ragged(1),
    Ragged(2),
    Ragged(32),
    Ragged("element"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, (torch.float32, torch.bfloat16)]
Arguments = dict[str, Any]

small = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16]), max_size=3)
# Lengths of real layers, beside odd and prime ones, in up to three dimensions.
large = st.lists(st.sampled_from([1, 3, 7, 80, 576, 1024, 4096, 4097, 11008, 7168, 50257]), max_size=3)


def arguments(shapes: st.SearchStrategy[list[int]], world_sizes: st.SearchStrategy[int]) -> Any:
    """All arguments of :func:`plan` except the layout."""

    @st.composite
    def make(draw: st.DrawFn) -> Arguments:
        drawn = draw(st.lists(shapes.map(tuple), max_size=8))
        per_parameter = {"min_size": len(drawn), "max_size": len(drawn)}
        return {
            "shapes": drawn,
            "world_size": draw(world_sizes),
            "dtypes": draw(st.lists(st.sampled_from(DTYPES), **per_parameter) | st.none()),
            "groups": draw(st.lists(st.booleans(), **per_parameter) | st.none()),
        }

    return make()


few_ranks = arguments(small, st.integers(1, 9))
many_ranks = arguments(large, st.integers(1, 4096) | st.sampled_from([8, 64, 256, 1024, 4096]))
kinds = st.sampled_from(KINDS)


def granule(kind: str | Ragged, shape: tuple[int, ...]) -> int:
    """The elements that stay together by the documentation, computed apart from the planner."""
    if math.prod(shape) == 0 or kind == Ragged("element"):
        return 1
    if kind == "per_parameter":
        return math.prod(shape[1:])
    assert isinstance(kind, Ragged)
    if len(shape) < 2:
        return 1 if kind == Ragged("row") else 256
    return shape[-1] * (kind.granule if isinstance(kind.granule, int) else 1)


def alignment(dtypes: tuple[torch.dtype, ...]) -> int:
    return ALIGNMENT // min(dtype.itemsize for dtype in dtypes)


@settings(deadline=None)
@given(few_ranks | many_ranks, kinds)
def test_every_element_is_owned_exactly_once_and_no_granule_is_cut(
    given: Arguments, kind: str | Ragged
) -> None:
    layout = plan(layout=kind, **given)
    covered = [0] * len(given["shapes"])
    for rank in range(layout.world_size):
        owned = layout.owned(rank)
        for index, start, stop in owned:
            shape, numel = given["shapes"][index], math.prod(given["shapes"][index])
            assert start < stop
            if not shape:
                assert (start, stop) == (0, 1)
                continue
            assert start == covered[index]
            covered[index] = stop
            whole = granule(kind, shape)
            assert start % whole == 0 and (stop % whole == 0 or stop == numel)
    for shape, reached in zip(given["shapes"], covered, strict=True):
        assert reached == (math.prod(shape) if shape else 0)


@settings(deadline=None)
@given(few_ranks, kinds)
def test_gathering_the_shards_gives_a_slab_that_holds_every_parameter(
    given: Arguments, kind: str | Ragged
) -> None:
    """The layout acted out on one process: cut the parameters into shards, gather those, look at the views."""
    layout = plan(layout=kind, **given)
    parameters = [torch.rand(shape) for shape in given["shapes"]]
    shards = torch.zeros(layout.world_size, layout.shard_numel)
    for rank in range(layout.world_size):
        for index, start, stop in layout.owned(rank):
            assert layout.range_of(index, rank) == (start, stop)
            at = layout.shard_offset(index, rank)
            assert not shards[rank, at : at + stop - start].any()
            shards[rank, at : at + stop - start] = parameters[index].flatten()[start:stop]
    slab = torch.zeros(layout.numel)
    for s in layout.segments:
        gathered = shards[:, s.shard_offset : s.shard_offset + s.chunk].flatten()
        place = slab[s.slab_offset : s.slab_offset + gathered.numel()]
        assert not place.any()
        place.copy_(gathered)
    for index, parameter in enumerate(parameters):
        start, stop = layout.span(index)
        assert torch.equal(slab[start:stop].view(parameter.shape), parameter)
    true = sum(p.numel() * (1 if p.ndim else layout.world_size) for p in parameters)
    assert (slab != 0).sum() <= true and layout.padding == (layout.numel / true - 1 if true else 0.0)


@settings(deadline=None)
@given(few_ranks | many_ranks, kinds)
def test_every_parameter_and_every_part_of_it_starts_on_16_bytes(
    given: Arguments, kind: str | Ragged
) -> None:
    layout = plan(layout=kind, **given)
    ranks = sorted({*range(min(layout.world_size, 9)), layout.world_size // 2, layout.world_size - 1})
    for s in layout.segments:
        align = alignment(s.dtypes)
        for m in s.members:
            assert layout.span(m.index)[0] % align == 0
            for rank in ranks:
                start, stop = layout.range_of(m.index, rank)
                at = layout.shard_offset(m.index, rank)
                assert s.shard_offset <= at <= s.shard_offset + s.chunk - (stop - start)
                assert start == stop or at % align == 0
        # Of a parameter that is alone in its segment only the shard's parts begin with the chunk.
        assert s.chunk % align == 0 or len(s.members) == 1


@settings(deadline=None)
@given(few_ranks | many_ranks, kinds)
def test_segments_hold_parameters_of_one_kind(given: Arguments, kind: str | Ragged) -> None:
    layout = plan(layout=kind, **given)
    count = len(given["shapes"])
    dtypes, groups = given["dtypes"] or [torch.float32] * count, given["groups"] or [None] * count
    keys = []
    for s in layout.segments:
        keys.append((s.dtypes, s.group))
        for m in s.members:
            dtype = dtypes[m.index]
            assert (
                s.dtypes == (dtype if isinstance(dtype, tuple) else (dtype,)) and s.group == groups[m.index]
            )
            assert s.replicated == (given["shapes"][m.index] == ())
    # Segments of one kind are neighbours, so that one cast and one collective can serve them.
    assert len({*keys}) == sum(a != b for a, b in zip([None, *keys], keys, strict=False))


@settings(deadline=None)
@given(few_ranks | many_ranks, st.sampled_from(KINDS[1:]))
def test_padding_is_below_two_granules_per_rank_and_alignment(given: Arguments, kind: Ragged) -> None:
    """Two blocks, to be exact: as many granules as fill 16 bytes, which for most rows is one; no more than the largest
    parameter of the segment."""
    layout = plan(layout=kind, **given)
    for s in layout.segments:
        if s.replicated:
            continue
        align = alignment(s.dtypes)
        longest = max(m.numel for m in s.members)
        block = max(min(math.lcm(m.granule, align), longest + align - 1) for m in s.members)
        padding = s.chunk * layout.world_size - sum(m.numel for m in s.members)
        assert padding < 2 * block * layout.world_size + align * len(s.members)


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 4096), st.sampled_from(KINDS[1:]))
def test_a_lone_matrix_pads_less_than_a_granule_per_rank(
    rows: int, row: int, ranks: int, kind: Ragged
) -> None:
    """Also one with rows of odd length, which in company would be cut in blocks that fill 16 bytes."""
    layout = plan([(rows, row)], ranks, kind, dtypes=[torch.bfloat16])
    whole = granule(kind, (rows, row))
    assert layout.numel - rows * row < (whole + 8) * ranks  # 8 elements of bfloat16 are the alignment


@settings(deadline=None)
@given(few_ranks | many_ranks, kinds)
def test_balance_is_the_largest_part_over_the_mean(given: Arguments, kind: str | Ragged) -> None:
    layout = plan(layout=kind, **given)
    loads = [sum(stop - start for _, start, stop in layout.owned(r)) for r in range(layout.world_size)]
    assert layout.balance == (max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0)


@settings(deadline=None)
@given(arguments(small, st.integers(1, 9)))
def test_per_parameter_is_the_layout_the_engine_has(given: Arguments) -> None:
    count = len(given["shapes"])
    given |= {"dtypes": None, "groups": None}
    layout = plan(**given)
    specs = [TensorSpec(f"p{i}", s, torch.float32, torch.float32) for i, s in enumerate(given["shapes"])]
    unit = plan_unit(specs, layout.world_size)
    expected = [s for run in unit.runs for s in run.segments]
    assert len(layout.segments) == len(expected) == count
    for ours, theirs in zip(layout.segments, expected, strict=True):
        assert ours.members[0].index == theirs.index
        assert (ours.chunk, ours.slab_offset, ours.shard_offset) == (
            theirs.chunk,
            theirs.slab_offset,
            theirs.shard_offset,
        )
        for rank in range(layout.world_size):
            start, stop = layout.range_of(theirs.index, rank)
            assert ours.replicated or stop - start == theirs.rows_of(rank) * theirs.row


def test_equal_arguments_give_equal_layouts() -> None:
    shapes = [(7, 5), (), (40,), (3, 8, 8)]
    assert plan(shapes, 3, "ragged") == plan(shapes, 3, Ragged("row"))
    assert hash(plan(shapes, 3, "ragged")) == hash(plan([torch.Size(s) for s in shapes], 3, "ragged"))
    assert plan(shapes, 3, "ragged") != plan(shapes, 3, Ragged(1))


def test_balance_counts_ranks_in_which_no_parameter_begins_or_ends() -> None:
    segment = RaggedSegment((Member(0, 4, 16, 4),), 8, 0, 0, (torch.float32,))
    assert Layout("per_parameter", 3, ((16,),), (segment,)).balance == 1.5


def test_one_rank_keeps_everything_in_one_segment_without_padding() -> None:
    for kind in KINDS[1:]:
        layout = plan([(33, 12), (7, 64), (40,), (3, 3, 4)], 1, kind)
        assert len(layout.segments) == 1 and layout.padding == 0


def test_order_saves_gaps() -> None:
    # Blocks of 8 rows on 4 ranks: whole blocks, then 15 rows, then the one that fills the sixteenth.
    layout = plan([(1, 4), (15, 4), (8, 4), (8, 4)], 4, Ragged(8))
    assert layout.padding == 0
    assert [m.index for m in layout.segments[0].members] == [2, 3, 1, 0]


def test_blocks_that_do_not_fit_cost_one_more_per_rank() -> None:
    # 25 rows reach into the fourth rank's part, 20 begin with the fifth's and end behind the sixth's.
    assert [s.chunk for s in plan([(20, 4), (25, 4)], 6, Ragged(8)).segments] == [16 * 4]


def test_rows_of_odd_length_are_cut_in_runs_that_fill_16_bytes() -> None:
    # 15 rows of 3 float32 each would be 180 bytes: four rows are 48, so 16 of them.
    layout = plan([(30, 3), (30, 3)], 4, "ragged")
    assert [s.chunk for s in layout.segments] == [48]
    assert layout.span(1) == (96, 186) and layout.owned(3) == [(1, 48, 90)]


def test_vectors_go_where_matrices_leave_room() -> None:
    # 5 rows of 64 on 4 ranks take 2 each, which leaves 3: enough for a bias of 100, in which no row is cut.
    layout = plan([(100,), (5, 64)], 4, "ragged")
    (segment,) = layout.segments
    assert segment.chunk == 128 and [m.index for m in segment.members] == [1, 0]
    assert layout.owned(2) == [(1, 256, 320), (0, 0, 64)] and layout.owned(3) == [(0, 64, 100)]
    # 4 rows fill the ranks; a segment of the bias alone costs less than a fifth row for each.
    assert [s.chunk for s in plan([(100,), (4, 64)], 4, "ragged").segments] == [64, 28]


def test_blocks_of_256_of_a_vector_stay_whole_for_block_optimizers() -> None:
    assert plan([(1000,)], 3, Ragged(32)).owned(0) == [(0, 0, 512)]
    assert plan([(1000,)], 3, "ragged").owned(0) == [(0, 0, 336)]


def test_a_layout_prints_its_segments() -> None:
    text = str(plan([(8, 6), (), (5,)], 2, Ragged(2)))
    assert text.splitlines() == [
        "Ragged(2) over 2 ranks: 3 segments, 36 elements per rank, padding 30.91%, balance 1.091",
        "  segment 0, 8 elements per rank: 2 [5]",
        "  segment 1, 24 elements per rank: 0 [8, 6]",
        "  segment 2, copied to every rank: 1 []",
    ]


@pytest.mark.parametrize("wrong", [0, -3, True, "rows", 1.5, None])
def test_other_granules_are_refused(wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=r'Ragged: expected "row", "element", a number of rows >= 1 or a function .*, found'
    ):
        Ragged(wrong)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layout": "row"}, 'layout: expected "per_parameter", "ragged" or a Ragged, found \'row\''),
        ({"world_size": 0}, "world_size: expected at least 1, found 0"),
        (
            {"shapes": [(2,), (3, -1)]},
            r"shapes: expected no negative dimension, found \(3, -1\) for parameter 1",
        ),
        ({"dtypes": []}, "dtypes: expected one for each of 1 parameters, found 0"),
        ({"groups": [1, 2]}, "groups: expected one for each of 1 parameters, found 2"),
    ],
)
def test_wrong_arguments_are_refused(given: Arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**{"shapes": [(2,)], "world_size": 2} | given)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    layout = plan([(4, 4)], 2)
    for rank in (-1, 2):
        with pytest.raises(IndexError, match=f"expected a rank from 0 to 1, found {rank}"):
            layout.owned(rank)
        with pytest.raises(IndexError, match="expected a rank"):
            layout.range_of(0, rank)


def test_a_layout_that_breaks_its_promises_cannot_be_made() -> None:
    good = plan([(4, 4), (2, 4)], 2, "ragged")
    (segment,) = good.segments
    first, second = segment.members

    def with_members(*members: Member, chunk: int = segment.chunk) -> Layout:
        return replace(good, segments=(replace(segment, members=members, chunk=chunk),))

    with pytest.raises(ValueError, match="expected 2 parameters, each whole"):
        with_members(first)
    with pytest.raises(
        ValueError, match=r"expected parameter 1 between 16 and 24 of its segment, found it at \[8, 16\)"
    ):
        with_members(first, replace(second, offset=8))
    with pytest.raises(ValueError, match=r"found it at \[20, 28\)"):
        with_members(first, replace(second, offset=20))
    with pytest.raises(ValueError, match="expected parameter 0 to be cut between granules of 4 elements"):
        with_members(first, second, chunk=14)
