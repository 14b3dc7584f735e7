"""Movements of tensors between the ranks that divide each sample: differentiable, each with one collective.

From a part of the tokens with all heads to all tokens of a part of the heads, and back; queries of causal attention to
the ranks that compute with them, and back. Shapes in names: B samples, S tokens, H heads, K head width. Nothing here
computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.context.rows import RowExchange, RowGather
from shardwright.context.split import Split


def copies_of_heads(heads: int, shared_heads: int, ranks: int) -> int:
    """Return how often each key and value head must be sent, so that all ranks get the same number of them.

    Each rank must get the heads that its query heads need. `ranks` divides `heads`, the number of query heads, which
    share `shared_heads` evenly.
    """
    if shared_heads % ranks == 0:
        return 1
    return ranks // shared_heads if ranks % shared_heads == 0 else heads // shared_heads


def repeated(x_BSHK: Tensor, copies: int) -> Tensor:
    """Return the heads, each `copies` times in turn. The gradient of a head is a sum in a fixed order."""
    if copies == 1:
        return x_BSHK
    return x_BSHK.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)


def to_heads(split: Split, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor [B, S / ranks, H, K] as [B, S, H / ranks, K], heads in rank order. H and K may differ."""
    ranks = split.ranks
    widths = [t.shape[2] // ranks * t.shape[3] for t in tensors]
    # [ranks, B, S / ranks, H / ranks * K]
    sent = torch.cat([t.unflatten(2, (ranks, -1)).movedim(2, 0).flatten(3) for t in tensors], dim=-1)
    received = RowExchange.apply(sent, [1] * ranks, [1] * ranks, split.group)
    whole = received.movedim(0, 1).flatten(1, 2)
    parts = whole.split(widths, dim=-1)
    return [part.unflatten(-1, (-1, t.shape[3])) for part, t in zip(parts, tensors, strict=True)]


def to_tokens(split: Split, x_BSHK: Tensor) -> Tensor:
    """Return a tensor [B, S, H / ranks, K] as [B, S / ranks, H, K]: the way back from `to_heads`."""
    ranks = split.ranks
    sent = x_BSHK.unflatten(1, (ranks, -1)).movedim(1, 0)
    received = RowExchange.apply(sent, [1] * ranks, [1] * ranks, split.group)
    return received.movedim(0, 2).flatten(2, 3)


def gathered(split: Split, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor [B, S / ranks, H, K] as [B, S, H, K]. All have the same H; K may differ."""
    widths = [t.shape[3] for t in tensors]
    rows = RowGather.apply(torch.cat(list(tensors), dim=-1).unsqueeze(0), split.group)
    return list(rows.movedim(0, 1).flatten(1, 2).split(widths, dim=-1))


def owners(rank: int, ranks: int) -> tuple[int, int]:
    """Return the ranks that compute with the two halves of this rank's queries, so that causal work is equal on all.

    Of 2 x `ranks` pieces of a sample rank r gets piece r and, counted from the end, piece r.
    """
    first, second = (min(piece, 2 * ranks - 1 - piece) for piece in (2 * rank, 2 * rank + 1))
    return first, second


def to_balanced(split: Split, x_BSHK: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's two pieces for causal work, see `owners`: each [B, S / (2 ranks), H, K], of [B, S / ranks, H,
    K]."""
    halves = x_BSHK.unflatten(1, (2, -1)).movedim(1, 0)
    if _backwards(split):
        halves = halves.flip(0)
    near, far = RowExchange.apply(halves, *_counts(split), split.group).unbind(0)
    return near, far


def from_balanced(split: Split, near_BSHK: Tensor, far_BSHK: Tensor) -> Tensor:
    """Return the pieces in the order that they had before `to_balanced`."""
    sent, received = _counts(split)
    halves = RowExchange.apply(torch.stack((near_BSHK, far_BSHK)), received, sent, split.group)
    if _backwards(split):
        halves = halves.flip(0)
    return halves.movedim(0, 1).flatten(1, 2)


def _backwards(split: Split) -> bool:
    """Return whether the second half goes to a rank before the one of the first half."""
    first, second = owners(split.rank, split.ranks)
    return second < first


def _counts(split: Split) -> tuple[list[int], list[int]]:
    """Return the halves that this rank sends to each rank, and gets from each."""
    ranks = range(split.ranks)
    sent = [owners(split.rank, split.ranks).count(other) for other in ranks]
    received = [owners(other, split.ranks).count(split.rank) for other in ranks]
    return sent, received
