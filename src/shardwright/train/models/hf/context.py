"""Models of transformers on ranks that divide each sample, through transformers' interface for attention.

A rank has a part of the tokens with their positions in the whole sample, and the documents of the whole sample. Masks
are made here, where attention is computed. Nothing here knows parameters. transformers is imported when needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.context import Part, Split, attend_part, exchanged, gather, shard, visible
from shardwright.engine.extend import ExtensionError
from shardwright.train.errors import UserError
from shardwright.train.models.hf import documents as trials
from shardwright.train.models.packed import Documents

#: The name of the attention here in transformers' interface.
NAME = "shardwright_context"
#: The attribute of an attention module that has its `Divided`.
_DIVIDED = "_shardwright_divided"


class Divided:
    """The samples of the last forward of a model: its parts run again in backward if they are checkpointed.

    Attributes:
        split: the ranks that divide them.
        documents_BS: int, the document of each token of the whole samples; None: one document.
        positions_BS: int64, of each token of the whole samples.
        mixes: False to compute each token by itself, which shows whether a model mixes tokens elsewhere.
    """

    def __init__(self, split: Split, mixes: bool = True) -> None:
        self.split, self.mixes = split, mixes
        self.documents_BS: Tensor | None = None
        self.positions_BS: Tensor | None = None

    def arguments(self, tokens_BS: Tensor, documents_BS: Tensor | None) -> dict[str, Any]:
        """Return the keyword arguments of transformers' forward for this rank's tokens. `documents_BS`: of whole
        samples."""
        length = tokens_BS.shape[1] * (self.split.ranks if self.split.divides else 1)
        documents = None if documents_BS is None else Documents(documents_BS)
        self.documents_BS = None if documents is None else documents.first_BS
        if documents is not None:
            self.positions_BS = documents.ages_BS
        else:
            self.positions_BS = torch.arange(length, device=tokens_BS.device).expand(len(tokens_BS), -1)
        own_BS = shard(self.positions_BS, self.split) if self.split.divides else self.positions_BS
        return {"position_ids": own_BS}

    def whole_logits(self, logits: tuple[Tensor, ...], samples: int) -> tuple[Tensor, ...]:
        """Return the logits [samples * S, E] of the routers of layers for whole samples, of those for this rank's
        tokens."""
        if not self.split.divides:
            return logits
        parts = (each.flatten(0, -2).unflatten(0, (samples, -1)) for each in logits)
        return tuple(gather(each, self.split).flatten(0, 1) for each in parts)

    def auxiliary_sums(self, whole: Callable[..., dict[str, Tensor]], extras: Any, targets_BS: Tensor) -> Any:
        """Return this rank's share of `HuggingFaceModel.auxiliary_sums`, which is `whole`, by its trained tokens."""
        if not self.split.divides:
            return whole(extras, targets_BS)
        targets_of_all_BS = gather(targets_BS, self.split)
        own, trained = ((each >= 0).sum() for each in (targets_BS, targets_of_all_BS))
        return {
            name: value * (own / trained.clamp(min=1))
            for name, value in whole(extras, targets_of_all_BS).items()
        }


def divide_samples(model: Any, split: Split) -> None:
    """Let the ranks of a split divide the samples of a `HuggingFaceModel`."""
    use_attention(model.model, Divided(split))
    model.divided = getattr(model.model, _DIVIDED)
    model.auxiliary_sums = functools.partial(model.divided.auxiliary_sums, model.auxiliary_sums)


def use_attention(model: Any, divided: Divided) -> None:
    """Let a model of transformers compute attention as `divided` says. `check_divides` says whether it can."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)
    for module in model.modules():
        object.__setattr__(module, _DIVIDED, divided)
        if _chooses_tables(module):
            module.forward = functools.partial(_rotary, divided, module.forward)


def check_divides(config: Any, ranks: int, separates: bool) -> None:
    """Refuse a model of transformers that does not compute the same where ranks divide samples.

    A small model of its class and settings runs with the attention here in the place of its own. Then it runs with each
    token by itself in all attention, on whole samples and on their second halves.

    Args:
        config: a ``PretrainedConfig`` of a causal language model.
        ranks: the value of `parallel.context`, for the message.
        separates: whether documents of a sample are kept apart.

    Raises:
        UserError: it does not, or no small model of its kind can be built.
    """
    with trials.unnoticed():
        try:
            reason = _difference(config, separates)
        except LookupError as error:
            reason = f"no small model of its kind can be built to look at ({error})"
    if reason:
        raise UserError(
            f"parallel.context: expected 1 for model type {config.model_type!r}, found {ranks}; {reason}"
        )


def _difference(config: Any, separates: bool) -> str:
    """Return the difference that ranks would make, in words; empty for none."""
    way = trials.separation_of(config) if separates else None
    small, model, plain = trials.small_model(config, getattr(config, "_attn_implementation", None))
    if way is not None and way.window:
        way = replace(way, window=small.sliding_window)
    tokens, documents = trials.trial_tokens(), trials.trial_documents() if way else None
    wanted = (
        plain if way is None else trials.logits_of(model, tokens, way.arguments(trials.trial_documents()))
    )
    if not model._can_set_attn_implementation():  # type: ignore[operator]
        return "its class does not take attention from transformers' AttentionInterface"
    divided = Divided(Split(None))
    use_attention(model, divided)
    try:
        found = trials.logits_of(model, tokens, {"use_cache": False} | divided.arguments(tokens, documents))
        if not bool((found - wanted).abs().max() <= _ALIKE * wanted.abs().max()):
            reason = "in a small model of its kind attention with masks made here gives other logits"
            chunks = getattr(config.get_text_config(), "attention_chunk_size", None)
            return (
                f"{reason}: chunked attention (attention_chunk_size = {chunks}) is missing"
                if chunks
                else reason
            )
        divided.mixes, half = False, tokens.shape[1] // 2
        arguments = divided.arguments(tokens, None)
        whole = trials.logits_of(model, tokens, {"use_cache": False} | arguments)[:, half:]
        arguments = {key: value[:, half:] for key, value in arguments.items()}
        part = trials.logits_of(model, tokens[:, half:], {"use_cache": False} | arguments)
    except Exception as error:  # of code that is not ours
        return f"forward of a small model of its kind raises {trials.described(error)}"
    if not bool((part - whole).abs().max() <= _ALIKE * whole.abs().max()):
        return "in a small model of its kind tokens see others, or their positions, outside of attention"
    return ""


#: Parts of the largest logit: of sums in another order.
_ALIKE = 1e-4


def _chooses_tables(module: nn.Module) -> bool:
    """Return whether rotary tables depend on the longest position."""
    kinds = getattr(module, "rope_type", None)
    kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _rotary(
    divided: Divided,
    forward: Callable[..., Any],
    x: Tensor,
    position_ids: Tensor,
    *more: Any,
    **keywords: Any,
) -> Any:
    """Return the tables of this rank's tokens, chosen by the positions of all."""
    if not divided.split.divides or divided.positions_BS is None:
        return forward(x, position_ids, *more, **keywords)
    return tuple(shard(each, divided.split) for each in forward(x, divided.positions_BS, *more, **keywords))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return an attention of transformers' interface: [B, H, S, K] in the arguments, [B, S, H, K] in the result."""
    divided: Divided = getattr(module, _DIVIDED)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    for problem, found in (
        ("a mask of its own", attention_mask is not None),
        ("biases of positions", position_bias is not None),
        ("attention without causal order", not causal),
        ("attention to other tokens than its own", query.shape[2] != key.shape[2]),
    ):
        if found:
            raise ExtensionError(
                f"{type(module).__name__} has {problem}, for which there is no context parallelism; set "
                "parallel.context to 1"
            )
    split = divided.split
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))

    def kernel(q: Tensor, k: Tensor, v: Tensor, part: Part) -> Tensor:
        sinks = None if s_aux is None else s_aux[part.heads.start : part.heads.stop]
        documents_BS = divided.documents_BS
        if softcap is not None:
            seen = visible(part, q.device, window=sliding_window, documents_BS=documents_BS)
            return _capped(q, k, v, seen, softcap, scaling, dropout)
        return attend_part(
            q, k, v, part, True, sliding_window, documents_BS, dropout=dropout, scale=scaling, sinks=sinks
        )

    if not divided.mixes:
        # Each token by itself, but with all that its place in the sample changes.
        return v.mean(2, keepdim=True) + (q.mean(-1) + k.mean((2, 3)).unsqueeze(-1)).unsqueeze(-1), None
    return exchanged(split, q, k, v, kernel, window=sliding_window), None


def _capped(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, cap: float, scale: float | None, dropout: float
) -> Tensor:
    """Attention whose scores are held below a cap, which no kernel of torch does: scores of all tokens in memory."""
    shared = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(shared, dim=2) for t in (k, v))
    scores = torch.einsum("brhk,bshk->bhrs", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = ((scores / cap).tanh() * cap).masked_fill(~seen, -torch.inf)
    weights = F.dropout(scores.float().softmax(-1).to(v.dtype), dropout)
    return torch.einsum("bhrs,bshk->brhk", weights, v)
