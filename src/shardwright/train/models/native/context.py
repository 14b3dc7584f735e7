"""The native models on ranks that divide each sample: their layers that mix tokens exchange them.

A rank has a part of the tokens, with positions in the whole sample, and the documents of the whole sample. Nothing here
knows parameters. Shapes in names as in `llama`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from shardwright.context import Split, attending
from shardwright.context.attending import Part
from shardwright.train.models.native.decoder import Decoder
from shardwright.train.models.native.llama import Attention
from shardwright.train.models.packed import Documents, documents_of

Attend = Callable[[Tensor, Tensor, Tensor, Documents | None], Tensor]


def divide_samples(model: Decoder, split: Split) -> None:
    """Let the ranks of a split divide the samples of a model. Its layers must not have been compiled."""
    model.documents_in = functools.partial(_documents_in, split)  # type: ignore[method-assign]
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = functools.partial(_attend, split, module.attend)  # type: ignore[method-assign]


def _documents_in(split: Split, documents_BS: Tensor | None, tokens_BS: Tensor) -> Documents | None:
    """The documents of the whole samples."""
    ranks = split.ranks if split.active else 1
    return documents_of(documents_BS, tokens_BS.repeat(1, ranks)) if documents_BS is not None else None


def _attend(
    split: Split,
    whole: Attend,
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    documents: Documents | None,
) -> Tensor:
    """`Attention.attend`, which is `whole`."""
    if not split.active:
        return whole(q_BSHK, k_BSHK, v_BSHK, documents)

    def kernel(q: Tensor, k: Tensor, v: Tensor, part: Part) -> Tensor:
        if part.is_whole:
            return whole(q, k, v, documents)
        first_BS = None if documents is None else documents.first_BS
        return attending.attend_part(q, k, v, part, documents_BS=first_BS)

    return attending.exchanged(split, q_BSHK, k_BSHK, v_BSHK, kernel)
