"""Transposes, slices, stacks and joins: reading is what torch's own functions give, and writing undoes it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from shardwright.checkpoint import Joined, Slice, Stacked, TensorSource, Transposed, source_of
from shardwright.checkpoint.pretrained.key_maps import keys_of, pieces_of, views_of

Stored = dict[str, torch.Tensor]
_numbers = itertools.count()  # no two keys are the same


@st.composite
def sources(
    draw: st.DrawFn, depth: int = 2, ndim: int | None = None
) -> tuple[TensorSource, torch.Tensor, Stored]:
    """A source, the tensor that torch makes in the same way, and the stored tensors it is made of."""
    ndim = draw(st.integers(0, 3)) if ndim is None else ndim
    kind = draw(st.sampled_from(["key", "slice", "transposed", "stacked", "joined"] if depth else ["key"]))
    key = f"k{next(_numbers)}"
    if kind == "stacked" and ndim:
        parts = [draw(sources(depth=depth - 1, ndim=ndim - 1))]
        parts += [_like(parts[0]) for _ in range(draw(st.integers(0, 2)))]
        whole = torch.stack([tensor for _, tensor, _ in parts])
        return Stacked(tuple(source for source, _, _ in parts)), whole, _union(parts)
    if kind == "joined" and ndim:
        dim = draw(st.integers(0, ndim - 1))
        parts = [draw(sources(depth=depth - 1, ndim=ndim))]
        parts += [_like(parts[0]) for _ in range(draw(st.integers(0, 2)))]
        sizes = tuple(tensor.shape[dim] for _, tensor, _ in parts) if draw(st.booleans()) else None
        whole = torch.cat([tensor for _, tensor, _ in parts], dim)
        return Joined(tuple(source for source, _, _ in parts), dim, sizes), whole, _union(parts)
    if kind == "transposed":
        source, tensor, stored = draw(sources(depth=depth - 1, ndim=ndim))
        dims = tuple(draw(st.permutations(range(ndim))))
        return Transposed(source, dims), tensor.permute(dims), stored
    shape = draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim))
    tensor = torch.rand(shape)
    if kind == "slice" and ndim:
        dim = draw(st.integers(0, ndim - 1))
        start = draw(st.integers(0, shape[dim] - 1))
        length = draw(st.integers(1, shape[dim] - start))
        return Slice(key, start, length, dim), tensor.narrow(dim, start, length), {key: tensor}
    return key, tensor, {key: tensor}


def _like(part: tuple[TensorSource, torch.Tensor, Stored]) -> tuple[TensorSource, torch.Tensor, Stored]:
    """The same once more, of other tensors."""
    source, _, stored = part
    new_names = {key: f"k{next(_numbers)}" for key in stored}

    def renamed(each: TensorSource) -> TensorSource:
        if isinstance(each, str):
            return new_names[each]
        if isinstance(each, Slice):
            return Slice(new_names[each.source], each.start, each.length, each.dim)
        if isinstance(each, Transposed):
            return Transposed(renamed(each.source), each.dims)
        parts = tuple(map(renamed, each.sources))
        return Stacked(parts) if isinstance(each, Stacked) else Joined(parts, each.dim, each.sizes)

    new = {new_names[key]: torch.rand(tensor.shape) for key, tensor in stored.items()}
    return renamed(source), _made(renamed(source), new), new


def _made(source: TensorSource, stored: Stored) -> torch.Tensor:
    if isinstance(source, str):
        return stored[source]
    if isinstance(source, Slice):
        return stored[source.source].narrow(source.dim, source.start, source.length)
    if isinstance(source, Transposed):
        return _made(source.source, stored).permute(source.dims)
    parts = [_made(each, stored) for each in source.sources]
    return torch.stack(parts) if isinstance(source, Stacked) else torch.cat(parts, source.dim)


def _union(parts: list[tuple[TensorSource, torch.Tensor, Stored]]) -> Stored:
    return {key: tensor for _, _, stored in parts for key, tensor in stored.items()}


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(sources())
def test_views_make_the_tensor_and_pieces_make_what_is_stored(
    made: tuple[TensorSource, torch.Tensor, Stored],
) -> None:
    source, expected, stored = made
    assert set(keys_of(source)) == set(stored)
    shape, views = views_of(source, stored.__getitem__)
    assert shape == expected.shape
    result, count = torch.full_like(expected, float("nan")), 0
    for offsets, view in views:
        box = tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))
        result[box] = view
        count += view.numel()
        assert view.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in stored.values()}
    assert torch.equal(result, expected) and count == expected.numel()
    for key, tensor, part in pieces_of(source, expected):
        whole = stored[key]
        assert torch.equal(tensor, whole if part is None else whole.narrow(part.dim, part.start, part.length))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Stacked(("a", "b")), r"'a' to 'b' are stacked and have shapes \(2, 3\) and \(3, 2\)"),
        (Joined(("a", "b")), r"joined along dimension 0 and have shapes \(2, 3\) and \(3, 2\)"),
        (Joined(("a", "a"), sizes=(1, 3)), r"joined in sizes \(1, 3\) along 0"),
        (Slice("a", 1, 2), r"'a' of shape \(2, 3\) has no entries 1 to 3 along dimension 0"),
        (Slice("a", 0, 1, dim=2), "no entries 0 to 1 along dimension 2"),
        (Transposed("a", (0, 2, 1)), r"'a' of shape \(2, 3\) cannot be permuted"),
    ],
)
def test_what_does_not_fit_together_is_told(source: TensorSource, said: str) -> None:
    stored = {"a": torch.zeros(2, 3), "b": torch.zeros(3, 2)}
    with pytest.raises(ValueError, match=said):
        views_of(source, stored.__getitem__)


def test_maps_may_be_tables_or_functions_and_nothing_else_comes_out_of_them() -> None:
    assert source_of(None, "a") == "a"
    assert source_of({"a": "b"}, "a") == "b" and source_of({"a": "b"}, "c") == "c"
    assert source_of({"a": None}, "a") is None
    assert source_of(lambda name: Transposed(f"m.{name}"), "a") == Transposed("m.a")
    with pytest.raises(TypeError, match=r"gave 7 \(int\) for 'a'"):
        source_of({"a": 7}, "a")  # type: ignore[dict-item]
    for wrong in (
        lambda: Transposed("a", (0, 0)),
        lambda: Stacked(()),
        lambda: Joined(("a",), sizes=(1, 2)),
        lambda: Slice("a", -1, 2),
    ):
        with pytest.raises(ValueError, match="needs"):
            wrong()
