"""Attention over samples that ranks divide: each rank computes whole rows of softmax, with the masks of one rank.

If the ranks divide the query heads, each gets all tokens of its heads. Else each gets all keys and values, and as much
causal work as the others. The computation itself is an argument. Nothing here knows a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right

from shardwright.context import exchange
from shardwright.context.split import Split, current, note_compiled, within
from shardwright.engine.compat import uncompiled


class Part(NamedTuple):
    """The part of an attention that one call of a kernel computes.

    Attributes:
        length: tokens of the whole sample.
        rows: the queries, by their places in the sample.
        keys: the keys and values, by their places in the sample.
        heads: the query heads.
    """

    length: int
    rows: range
    keys: range
    heads: range

    @property
    def is_whole(self) -> bool:
        """Whether the part has all queries and keys of its heads."""
        return len(self.rows) == len(self.keys) == self.length


Kernel = Callable[[Tensor, Tensor, Tensor, Part], Tensor]
"""A function from queries [B, rows, H, K], keys and values [B, keys, G, K] to [B, rows, H, K], on one rank."""


def exchanged(
    split: Split,
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    kernel: Kernel,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Attention of this rank's tokens to those of the whole sample: [B, S / ranks, H, K].

    Args:
        split: the ranks that divide each sample.
        q_BSHK: queries of this rank's tokens, [B, S / ranks, H, K].
        k_BSGK: their keys, for G heads that groups of query heads share.
        v_BSGK: their values, which may have another width.
        kernel: computes a part. It masks what a query must not see.
        causal: no query sees a later key, so the kernel needs none of those.
        window: the number of keys that a query sees, its own token included. For causal attention.
    """
    heads, ranks = q_BSHK.shape[2], split.ranks
    if not split.divides:
        every = range(q_BSHK.shape[1])
        return kernel(q_BSHK, k_BSGK, v_BSGK, Part(len(every), every, every, range(heads)))
    if torch.compiler.is_compiling():
        note_compiled(split.name)  # compiled code under a checkpoint must not write attributes
    else:
        split.attended = True
    length = q_BSHK.shape[1] * ranks
    every, own = range(length), split.part(length)
    if heads % ranks == 0:
        copies = exchange.copies_of_heads(heads, k_BSGK.shape[2], ranks)
        keys_and_values = [exchange.repeated(t, copies) for t in (k_BSGK, v_BSGK)]
        q, k, v = exchange.to_heads(split, [q_BSHK, *keys_and_values])
        own_heads = range(split.rank * q.shape[2], (split.rank + 1) * q.shape[2])
        return exchange.to_tokens(split, kernel(q, k, v, Part(length, every, every, own_heads)))

    k, v = exchange.gathered(split, [k_BSGK, v_BSGK])

    def computed(queries: Tensor, rows: range) -> Tensor:
        last = rows.stop if causal else length
        first = max(0, rows.start + 1 - window) if causal and window else 0
        part = Part(length, rows, range(first, last), range(heads))
        return kernel(queries, k[:, first:last], v[:, first:last], part)

    half = len(own) // 2
    if not causal or len(own) % 2:
        return computed(q_BSHK, own)
    near, far = exchange.to_balanced(split, q_BSHK)
    start, end = split.rank * half, length - split.rank * half
    return exchange.from_balanced(
        split, computed(near, range(start, start + half)), computed(far, range(end - half, end))
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | None = None,
    documents: Tensor | None = None,
    mesh: DeviceMesh | Split | None = None,
) -> Tensor:
    """Compute torch's ``scaled_dot_product_attention`` over whole samples, of which each rank has a part.

    Heads need not be a multiple of the ranks. If they are, each rank computes all tokens of its heads: exactly what one
    rank computes for these heads. If not, it gets all keys and values.

    Args:
        query: [B, H, S / ranks, K], of this rank's tokens.
        key: [B, G, S / ranks, K].
        value: [B, G, S / ranks, any width].
        attn_mask: of the whole sample: bool or float, 4-D with sizes that broadcast to [B, H, S, S].
        dropout_p: probability of a dropped weight. Ranks that draw the same numbers drop alike.
        is_causal: whether no query sees a later key.
        scale: of the scores; None: 1 / sqrt(K).
        enable_gqa: whether G may be smaller than H.
        window: the number of keys that a query sees, itself the last one. With `is_causal`.
        documents: int [B, S], the document of each token of the whole sample. A query sees its own document alone.
        mesh: the ranks that divide each sample. None: those of the module that runs, see `context_parallel`; outside
            of such modules this rank alone.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    split = current() if mesh is None else mesh if isinstance(mesh, Split) else Split(mesh)
    divides = split is not None and split.divides
    length = query.shape[2] * (split.ranks if split is not None and divides else 1)
    _check(query, key, value, attn_mask, length, is_causal, window, documents, enable_gqa)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))

    def kernel(q: Tensor, k: Tensor, v: Tensor, part: Part) -> Tensor:
        mask = None if attn_mask is None else _of_part(attn_mask, part)
        return attend_part(q, k, v, part, is_causal, window, documents, mask, dropout_p, scale)

    if split is None or not divides:
        every = range(length)
        return kernel(q, k, v, Part(length, every, every, range(q.shape[2]))).transpose(1, 2)
    return _outside(split, q, k, v, kernel, is_causal, window).transpose(1, 2)


@uncompiled  # a graph of torch 2.13 that is made while modes of functions are active has other results
def _outside(split: Split, *arguments: Any) -> Tensor:
    """`exchanged` outside of the modules of `context_parallel`, which would exchange what the kernel calls."""
    with within(None):
        return exchanged(split, *arguments)


def attend_part(
    q_BRHK: Tensor,
    k_BKGK: Tensor,
    v_BKGK: Tensor,
    part: Part,
    causal: bool = True,
    window: int | None = None,
    documents_BS: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Torch's attention as a kernel for `exchanged`: [B, rows, H, K].

    Args:
        q_BRHK, k_BKGK, v_BKGK, part: as for a `Kernel`.
        causal, window, documents_BS: as for `visible`.
        mask: of the part, in the place of those.
        dropout: probability of a dropped weight.
        scale: of the scores; None: 1 / sqrt(K).
        sinks: of each query head of the part, the score of a key that every query sees, and that has no value.
    """
    if sinks is not None:
        scale = q_BRHK.shape[-1] ** -0.5 if scale is None else scale
        q_BRHK, k_BKGK, v_BKGK = _with_sinks(q_BRHK, k_BKGK, v_BKGK, sinks / scale)
    q, k, v = (t.transpose(1, 2) for t in (q_BRHK, k_BKGK, v_BKGK))
    attn_mask: Any = mask
    first = 0 if sinks is None else 1
    plain = mask is None and window is None and documents_BS is None
    square = part.is_whole and sinks is None
    if plain and causal and not square and q.device.type == "cuda":
        attn_mask = causal_lower_right(q.shape[2], k.shape[2])  # a kernel without a mask in memory
    elif mask is None and not (plain and (square or not causal)):
        attn_mask = F.pad(visible(part, q.device, causal, window, documents_BS), (first, 0), value=True)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=causal and attn_mask is None, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    ).transpose(1, 2)  # fmt: skip


def _with_sinks(q_BRHK: Tensor, k_BKGK: Tensor, v_BKGK: Tensor, sinks_H: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys that are wider, and a first key whose product with a query of head h is `sinks_H[h]`."""
    wider = 8  # kernels take multiples of it
    q = F.pad(q_BRHK, (0, wider - 1))
    q = torch.cat((q, sinks_H.to(q.dtype).view(-1, 1).expand(*q.shape[:-1], 1)), dim=-1)
    k = F.pad(k_BKGK, (0, wider, 0, 0, 1, 0))
    k = torch.cat(
        (F.pad(k.new_zeros(*k.shape[:1], 1, k.shape[2], k.shape[3] - 1), (0, 1), value=1), k[:, 1:]), dim=1
    )
    return q, k, F.pad(v_BKGK, (0, 0, 0, 0, 1, 0))


def visible(
    part: Part,
    device: torch.device,
    causal: bool = True,
    window: int | None = None,
    documents_BS: Tensor | None = None,
) -> Tensor:
    """Return the keys that each query of a part sees: bool [rows, keys], or [B, 1, rows, keys] with documents.

    `documents_BS`: int, equal for the tokens of a document, and different for those of others, of the whole sample.
    """
    rows_R1 = torch.arange(part.rows.start, part.rows.stop, device=device).unsqueeze(1)
    keys_K = torch.arange(part.keys.start, part.keys.stop, device=device)
    seen = keys_K <= rows_R1 if causal else torch.ones_like(keys_K <= rows_R1)
    if window is not None:
        seen = seen & (keys_K > rows_R1 - window)
    if documents_BS is not None:
        rows = documents_BS[:, part.rows.start : part.rows.stop].unsqueeze(2)
        keys = documents_BS[:, part.keys.start : part.keys.stop].unsqueeze(1)
        seen = (seen & (rows == keys)).unsqueeze(1)
    return seen


def _of_part(mask: Tensor, part: Part) -> Tensor:
    """Return the part of a mask [B, H, S, S] for this rank's rows. Each size of the mask may be 1."""
    ranges = (part.heads, part.rows, part.keys)
    for dim, own in enumerate(ranges, start=1):
        if mask.shape[dim] > 1:
            mask = mask.narrow(dim, own.start, len(own))
    return mask


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    length: int,
    is_causal: bool,
    window: int | None,
    documents: Tensor | None,
    enable_gqa: bool,
) -> None:
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ValueError(
            f"attention: expected queries, keys and values of 4 dimensions, [B, H, S, K], found {query.ndim}, "
            f"{key.ndim} and {value.ndim}"
        )
    heads, shared = query.shape[1], key.shape[1]
    if heads % shared or (heads != shared and not enable_gqa) or value.shape[1] != shared:
        raise ValueError(
            f"attention: expected as many heads of keys and values as of queries, {heads}, or a divisor of it with "
            f"enable_gqa, found {shared} and {value.shape[1]}"
        )
    if query.shape[2] != key.shape[2] or key.shape[2] != value.shape[2]:
        raise ValueError(
            f"attention: expected queries, keys and values of the same tokens, found {query.shape[2]}, {key.shape[2]} "
            f"and {value.shape[2]} of them; cross-attention has no context parallelism"
        )
    if window is not None and window < 1:
        raise ValueError(f"window: expected a number of keys, 1 or more, found {window}")
    if attn_mask is not None:
        if is_causal or window is not None or documents is not None:
            raise ValueError(
                "attention: expected attn_mask alone, or is_causal, window and documents; put all of them into the mask"
            )
        sizes = (query.shape[0], heads, length, length)
        if attn_mask.ndim != 4 or any(
            n not in (1, size) for n, size in zip(attn_mask.shape, sizes, strict=True)
        ):
            raise ValueError(
                f"attn_mask: expected a mask of whole samples, of 4 dimensions that broadcast to {list(sizes)}, found "
                f"{list(attn_mask.shape)}; for masks of causal attention use is_causal, window and documents"
            )
    if window is not None and not is_causal:
        raise ValueError("window: expected is_causal=True with it, found False")
    if documents is not None and documents.shape != (query.shape[0], length):
        raise ValueError(
            f"documents: expected a number for each token of the whole samples, of shape "
            f"{[query.shape[0], length]}, found {list(documents.shape)}"
        )
