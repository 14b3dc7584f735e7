"""Truncated normal numbers with the bits of torch, in the memory of the tensor and a small piece.

torch's own loop makes several tensors of the whole size. For the embedding of a large model this is more memory than
everything else in ``materialize``. This file does not record or shard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.engine.compat import outside_dispatch_modes

PIECE = 1 << 22
"""Elements that are drawn at once. The CPU's generator makes normal numbers in groups of 16, so pieces are multiples of
that."""


def with_little_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, torch's initialiser, but with pieces for large CPU tensors if these give the same bits."""

    @functools.wraps(original)
    def fill(
        tensor: torch.Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> Any:
        if (
            tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and tensor.numel() > PIECE
            and _is_redrawn(mean, std, a, b)
            and _draws_in_pieces(original, tensor.dtype)
        ):
            return fill_in_pieces(tensor, mean, std, a, b, generator, PIECE)
        return original(tensor, mean, std, a, b, generator=generator)

    return fill


def fill_in_pieces(
    tensor: torch.Tensor,
    mean: float,
    std: float,
    a: float,
    b: float,
    generator: torch.Generator | None,
    piece: int,
) -> torch.Tensor:
    """Draw all elements. Draw all again for elements out of bounds, until none is, as torch does."""
    flat = tensor.detach().view(-1)
    with torch.no_grad():
        low, high = (torch.tensor(bound, dtype=tensor.dtype, device="cpu").item() for bound in (a, b))
        flat.normal_(mean, std, generator=generator)
        pieces = _pieces(flat, piece)
        room = torch.empty_like(max(pieces, key=len))
        while any(_outside(part, low, high).any() for part in pieces):
            for part in pieces:
                fresh = room[: len(part)].normal_(mean, std, generator=generator)
                torch.where(_outside(part, low, high), fresh, part, out=part)
    return tensor


@contextmanager
def draws_one_piece() -> Iterator[None]:
    """Inside the context, look at one piece of a large tensor's numbers, not at hundreds, because a plan reads none.

    A piece takes the same memory as all of them, one after another.
    """
    global fill_in_pieces
    plain = fill_in_pieces

    def fill(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any, piece: int
    ) -> torch.Tensor:
        flat = tensor.detach().view(-1)
        if len(flat) <= PIECE:  # of a check of torch's numbers
            return plain(tensor, mean, std, a, b, generator, piece)
        with torch.no_grad():
            flat.normal_(mean, std, generator=generator)
        plain(flat[:piece], mean, std, a, b, generator, piece)
        return tensor

    fill_in_pieces = fill
    try:
        yield
    finally:
        fill_in_pieces = plain


def _outside(part: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (part < low).logical_or_(part > high)


def _pieces(flat: torch.Tensor, piece: int) -> list[torch.Tensor]:
    """Pieces of one size. The last piece also takes the rest."""
    count = max(1, len(flat) // piece)
    ends = [piece * number for number in range(1, count)]
    return list(flat.tensor_split(ends))


def _is_redrawn(mean: float, std: float, a: float, b: float) -> bool:
    """Return whether torch redraws elements out of bounds, with bounds that keep most elements."""
    if mean < a - 2 * std or mean > b + 2 * std:
        return False

    def below(x: float) -> float:
        return (1.0 + math.erf(x / math.sqrt(2.0))) / 2.0

    return below((b - mean) / std) - below((a - mean) / std) > 0.3


@functools.cache
def _draws_in_pieces(original: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Return whether pieces give the bits of torch's own loop in this torch version."""
    results = []
    for fill in (original, functools.partial(fill_in_pieces, piece=48)):
        generator = torch.Generator().manual_seed(7)
        with outside_dispatch_modes():  # a mode around the first call must not change what is kept
            whole = torch.empty(48 * 20 + 5, dtype=dtype, device="cpu")
            fill(whole, 0.0, 0.02, -0.03, 0.03, generator=generator)
        results.append((whole, generator.get_state()))
    with outside_dispatch_modes():
        return all(torch.equal(*pair) for pair in zip(*results, strict=True))
