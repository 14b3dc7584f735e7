"""The native models on ranks that divide each sample: their layers that mix tokens exchange them.

A rank has a part of the tokens, with positions in the whole sample, and the documents of the whole sample. Nothing here
knows parameters. Shapes in names as in `llama`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from shardwright.context import (
    Part,
    Split,
    copies_of_heads,
    exchanged,
    gather,
    repeated,
    shard,
    to_heads,
    to_tokens,
)
from shardwright.train.config import Config
from shardwright.train.config.shapes.presets import HybridConfig
from shardwright.train.errors import UserError
from shardwright.train.models.native.decoder import Decoder
from shardwright.train.models.native.hybrid import (
    Extras,
    Hybrid,
    MixtureOfExperts,
    NextButOne,
    imbalance,
    scaled_loss,
)
from shardwright.train.models.native.llama import Attention
from shardwright.train.models.native.mamba import Mamba2
from shardwright.train.models.packed import IGNORED, Documents, attend_part, documents_of

Attend = Callable[[Tensor, Tensor, Tensor, Documents | None], Tensor]


def divide_samples(model: Decoder, split: Split) -> None:
    """Let the ranks of a split divide the samples of a model. Its layers must not have been compiled."""
    model.documents_in = functools.partial(_documents_in, split)  # type: ignore[method-assign]
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = functools.partial(_attend, split, module.attend)  # type: ignore[method-assign]
        elif isinstance(module, Mamba2):
            part = _OwnHeads(module.config, split.ranks)
            module.mixed = functools.partial(_mixed, split, part, module)  # type: ignore[method-assign]
        elif isinstance(module, MixtureOfExperts):
            module.uneven = functools.partial(_uneven, split, 0)  # type: ignore[method-assign]
    if isinstance(model, Hybrid):
        model.auxiliary_sums = functools.partial(_auxiliary_sums, split)  # type: ignore[method-assign]
        if model.mtp is not None:
            model.mtp.aligned = functools.partial(_aligned, split)  # type: ignore[method-assign]
            model.mtp.predicting = functools.partial(_predicting, split)  # type: ignore[method-assign]
            for module in model.mtp.modules():
                if isinstance(module, MixtureOfExperts):  # which must not count the filler
                    module.uneven = functools.partial(_uneven, split, 1)  # type: ignore[method-assign]


def check_hybrid(shape: HybridConfig, config: Config) -> None:
    """Refuse a hybrid whose layers the ranks that divide samples cannot divide."""
    ranks, cutting = config.parallel.parts_of("samples"), config.parallel.parts_of("layers")
    kinds = shape.pattern + shape.mtp_pattern
    if ranks > 1 and "M" in kinds and shape.mamba_heads % ranks:
        raise UserError(
            f"model.mamba_heads: expected a multiple of parallel.context = {ranks}, whose ranks divide the heads, "
            f"found {shape.mamba_heads}"
        )
    if ranks > 1 and cutting > 1 and ("M" in kinds or "E" in kinds or shape.mtp_pattern):
        raise UserError(
            f"parallel.tensor: expected 1 with parallel.context = {ranks} and Mamba-2 layers, experts or "
            f"model.mtp_pattern, found {cutting}; only one of both divides these"
        )


def _documents_in(
    split: Split, documents_BS: Tensor | None, tokens_BS: Tensor, edges: Tensor | None
) -> Documents | None:
    """Return the documents of the whole samples."""
    return documents_of(documents_BS, tokens_BS.repeat(1, split.ranks if split.divides else 1), edges)


def _attend(
    split: Split,
    whole: Attend,
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    documents: Documents | None,
) -> Tensor:
    """`Attention.attend`, which is `whole`."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, part: Part) -> Tensor:
        if part.is_whole:
            return whole(q, k, v, documents)
        return attend_part(q, k, v, documents, part)

    return exchanged(split, q_BSHK, k_BSHK, v_BSHK, kernel)


# ---------------------------------------------------------------------------------------------------------------
# Mamba-2


class _OwnHeads(Mamba2):
    """The heads and groups of a Mamba-2 layer that a rank mixes, on the meta device. Ranks may share a group."""

    def __init__(self, config: HybridConfig, ranks: int) -> None:
        #: By which each group is sent.
        self.copies = copies_of_heads(config.mamba_heads, config.mamba_groups, ranks)
        groups = config.mamba_groups * self.copies // ranks
        with torch.device("meta"):
            super().__init__(replace(config, mamba_heads=config.mamba_heads // ranks, mamba_groups=groups))

    def forward(self, convolved: Tensor, dt_BSH: Tensor, documents: Documents | None) -> Tensor:  # type: ignore[override]
        return self.mixed(convolved, dt_BSH, documents)


def _mixed(
    split: Split,
    part: _OwnHeads,
    module: Mamba2,
    convolved_BSC: Tensor,
    dt_BSH: Tensor,
    documents: Documents | None,
) -> Tensor:
    """`Mamba2.mixed` of this rank's tokens: it computes all tokens of its heads."""
    if not split.divides:
        return Mamba2.mixed(module, convolved_BSC, dt_BSH, documents)
    c = module.config
    shared = c.mamba_groups * c.mamba_state
    x, b, c_ = convolved_BSC.split([c.mamba_dim, shared, shared], dim=-1)
    states = (c.mamba_groups, c.mamba_state)
    groups = [repeated(t.unflatten(-1, states), part.copies) for t in (b, c_)]
    heads = [x.unflatten(-1, (c.mamba_heads, c.mamba_head_dim)), *groups, dt_BSH.unsqueeze(-1)]
    *convolved, dt = to_heads(split, heads)
    parameters = _parameters_of_heads(split.rank, part, module)
    arguments = torch.cat([t.flatten(2) for t in convolved], dim=-1), dt.squeeze(-1), documents
    return to_tokens(split, functional_call(part, parameters, arguments))


def _parameters_of_heads(rank: int, part: _OwnHeads, module: Mamba2) -> dict[str, Tensor]:
    """Return the parameters with which a rank mixes, as they are at this moment."""
    c, own = module.config, part.config
    groups = [(rank * own.mamba_groups + place) // part.copies for place in range(own.mamba_groups)]
    width = own.mamba_heads * c.mamba_head_dim
    rows = [(rank * width, width)]
    for first in (c.mamba_dim, c.mamba_dim + c.mamba_groups * c.mamba_state):
        rows += [(first + group * c.mamba_state, c.mamba_state) for group in groups]
    names = {"conv_weight": rows, "conv_bias": rows}
    heads = [(rank * own.mamba_heads, own.mamba_heads)]
    names |= dict.fromkeys(("dt_bias", "a_log", "skip"), heads)
    return {
        name: torch.cat([getattr(module, name).narrow(0, start, count) for start, count in ranges])
        for name, ranges in names.items()
    }


# ---------------------------------------------------------------------------------------------------------------
# Losses beside the cross-entropy


def _uneven(
    split: Split,
    left_out: int,
    probability_BSE: Tensor,
    expert_BSK: Tensor,
    documents: Documents | None,
) -> Tensor:
    """`MixtureOfExperts.uneven` of whole samples: of each, or of this rank's tokens in their documents.

    `left_out`: tokens at the end of a sample that are not counted.
    """
    if not split.divides:
        return imbalance(probability_BSE, expert_BSK, documents)
    probability_BSE, expert_BSK = gather(probability_BSE, split), gather(expert_BSK, split)
    if documents is not None:
        return shard(imbalance(probability_BSE, expert_BSK, documents), split)
    length = probability_BSE.shape[1] - left_out
    return imbalance(probability_BSE[:, :length], expert_BSK[:, :length])


def _aligned(
    split: Split, x_BSD: Tensor, embedded_BSD: Tensor, documents: Documents | None = None
) -> tuple[Tensor, Tensor, Documents | None]:
    """`NextButOne.aligned` of this rank's tokens, with a filler behind the last token of a sample."""
    if not split.divides:
        return NextButOne.aligned(x_BSD, embedded_BSD, documents)
    firsts_BRD = gather(embedded_BSD[:, :1], split)
    behind = (split.rank + 1) % split.ranks
    next_BSD = torch.cat((embedded_BSD[:, 1:], firsts_BRD[:, behind : behind + 1]), dim=1)
    return x_BSD, next_BSD, None if documents is None else documents.of_pairs()


def _predicting(split: Split, length: int) -> int:
    return length if split.divides else NextButOne.predicting(length)


def _auxiliary_sums(split: Split, extras: object, targets_BS: Tensor) -> dict[str, Tensor]:
    """`Hybrid.auxiliary_sums` over this rank's tokens."""
    if not split.divides:
        return Hybrid.auxiliary_sums(extras, targets_BS)
    assert isinstance(extras, Extras)
    sums, trained_BS = {}, targets_BS != IGNORED
    if extras.imbalance_B is not None:
        uneven = extras.imbalance_B if extras.documents is not None else extras.imbalance_B.unsqueeze(1)
        sums["balance"] = (uneven * trained_BS).sum()
    if extras.mtp_logits_BSV is not None:
        following_BS, scale_BS = _further_targets(gather(targets_BS, split), extras.documents)
        targets_BS, scale_BS = shard(following_BS, split), shard(scale_BS, split)
        sums["mtp"] = scaled_loss(extras.mtp_logits_BSV, targets_BS, scale_BS)
    return sums


def _further_targets(targets_BS: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
    """For each token of whole samples the token after the next, and the factor of its loss, see `auxiliary_sums`."""
    following_BS = F.pad(targets_BS[:, 1:], (0, 1), value=IGNORED)
    if documents is not None:
        following_BS = following_BS.masked_fill(documents.ends_BS, IGNORED)
    both_BS2 = torch.stack((targets_BS != IGNORED, following_BS != IGNORED), dim=-1).float()
    counts_BS2 = both_BS2.sum(1, keepdim=True) if documents is None else documents.sums(both_BS2)
    trained, predicted = counts_BS2.unbind(-1)
    return following_BS, (trained / predicted.clamp(min=1)).expand_as(following_BS)
