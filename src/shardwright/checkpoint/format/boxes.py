"""Boxes of a tensor: ranges of its elements along every dimension, with their values or without."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from shardwright.common.errors import Damaged

Bounds = tuple[Sequence[int], Sequence[int]]  #: offsets and sizes of a box


class Box(NamedTuple):
    """A box of a tensor, and its memory: a view of that shape."""

    offsets: tuple[int, ...]
    local: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.local.shape)


def overlap(one: Bounds, other: Bounds) -> Overlap | None:
    """Return the elements that two boxes share; None if there are none."""
    begins = tuple(map(max, one[0], other[0]))
    ends = tuple(min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True))
    return Overlap(begins, ends) if all(a < b for a, b in zip(begins, ends, strict=True)) else None


class Overlap(NamedTuple):
    """The elements that two boxes of a tensor share: from ``begins`` to ``ends``, along every dimension."""

    begins: tuple[int, ...]
    ends: tuple[int, ...]

    def of(self, tensor: Tensor, offsets: Sequence[int], first: int = 0) -> Tensor:
        """Return the view of them in a box with these offsets. The dimensions before ``first`` stay whole."""
        for dim in range(first, len(self.begins)):
            begin = self.begins[dim]
            if (begin, self.ends[dim]) != (offsets[dim], offsets[dim] + tensor.shape[dim]):
                tensor = tensor.narrow(dim, begin - offsets[dim], self.ends[dim] - begin)
        return tensor


def meet(one: Bounds, other: Bounds) -> bool:
    """Return whether two boxes share an element."""
    return all(a < b + n and b < a + m for a, m, b, n in zip(*one, *other, strict=True))


def check_coverage(name: str, shape: Sequence[int], boxes: Sequence[Bounds]) -> None:
    """Raise Damaged unless every element of a tensor of that shape is in exactly one of the boxes."""
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise Damaged(f"{name!r} has a part outside its shape {tuple(shape)}")
    if sum(prod(sizes) for _, sizes in boxes) != prod(shape) or _any_overlap(boxes):
        raise Damaged(f"{name!r} of shape {tuple(shape)} has parts that are missing or stored twice")


def _any_overlap(boxes: Sequence[Bounds]) -> bool:
    """Return whether two boxes share an element. Compares boxes that meet along the dimension with the most starts."""
    full = [(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes if prod(sizes)]
    if len(full) < 2:
        return False
    dims = range(len(full[0][0]))
    if not dims:
        return True
    sweep = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in full}))
    full.sort(key=lambda box: box[0][sweep])
    open_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for box in full:
        open_boxes = [each for each in open_boxes if each[0][sweep] + each[1][sweep] > box[0][sweep]]
        if any(meet(box, each) for each in open_boxes):
            return True
        open_boxes.append(box)
    return False
