"""Several documents in one sample of a transformers model: what its forward needs, and whether it keeps them apart.

No list of model classes decides: `separation_of` builds a small model of the same class and settings, changes all other
documents of a sample, and looks whether a document's logits change. transformers is imported only there. The native
models are in `packed`.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwright.train.config.sections.data import ONE_OR_UNMASKED
from shardwright.train.errors import UserError
from shardwright.train.models.packed import Documents

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Attention whose separation is computed here. The flash kernels of transformers find documents in samples of a batch
#: of one alone, and mix them without an error in larger batches.
ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class Separation:
    """The arguments by which a transformers model keeps the documents of a sample apart.

    Attributes:
        positions: forward takes `position_ids`.
        mask: "none": transformers makes a mask for each kind of layer, where positions restart. "boolean" or
            "additive": forward needs a mask of four dimensions.
        window: tokens that layers with a sliding window see. Forward then needs a mask for each kind of layer: those of
            GPT-OSS in transformers 5.23, which makes its own masks without looking at positions. 0: one mask for all.
    """

    positions: bool
    mask: str
    window: int = 0

    def arguments(
        self, documents_BS: Tensor, positions_BS: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """Return the keyword arguments of forward beside `input_ids`.

        Args:
            documents_BS: int, the number of each token's document in its sample.
            positions_BS: int64, which must restart at 0 with each document; computed if None.
            dtype: of the activations, for an additive mask.
        """
        # With a cache transformers does not look for documents, nor with any 2-D mask, even one of ones alone.
        arguments: dict[str, Any] = {"use_cache": False}
        documents = Documents(documents_BS) if positions_BS is None or self.mask != "none" else None
        if self.positions:
            arguments["position_ids"] = (
                documents.ages_BS if positions_BS is None and documents else positions_BS
            )
        if self.mask != "none":
            assert documents is not None
            seen_BSS = documents.mask()
            mask: Any = self._mask(seen_BSS, dtype)
            if self.window:
                near_BSS = seen_BSS.triu(1 - self.window)
                mask = {"full_attention": mask, "sliding_attention": self._mask(near_BSS, dtype)}
            arguments["attention_mask"] = mask
        return arguments

    def _mask(self, seen_BSS: Tensor, dtype: torch.dtype) -> Tensor:
        seen_B1SS = seen_BSS.unsqueeze(1)
        if self.mask == "boolean":
            return seen_B1SS
        return torch.zeros_like(seen_B1SS, dtype=dtype).masked_fill(~seen_B1SS, torch.finfo(dtype).min)


def separation_of(config: Any, build: Callable[[Any], nn.Module] | None = None) -> Separation:
    """Return the Separation of the model of a transformers config, found with a small model of its class.

    The first call for a config takes about a second for 32 layers on one thread of a CPU, and leaves random numbers,
    the config and torch's defaults as they are. It allocates the parameters of the small model: 400 MB at most.

    Args:
        config: a ``PretrainedConfig`` of a causal language model, with the attention implementation of the training.
        build: makes the model of a config; by default ``AutoModelForCausalLM.from_config``.

    Raises:
        UserError: documents of the model's samples would see one another, or no small model shows whether they do.
    """
    attention = getattr(config, "_attn_implementation", None)
    values = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if build is None and (known := _found.get((values, attention))) is not None:
        return known
    if attention is not None and attention not in ATTENTION:
        raise _refusal(
            config, f"documents stay apart only in {' and '.join(ATTENTION)} attention, found {attention}"
        )
    with unnoticed():
        try:
            small, model, plain = small_model(config, attention, build)
        except LookupError as error:
            reason = f"no small model of its kind can be built to look whether documents stay apart ({error})"
            raise _refusal(config, reason) from error
        way = _first_that_separates(config, small, model, plain)
    way = replace(way, window=config.sliding_window) if way.window else way
    if build is None:
        _found[values, attention] = way
    return way


_found: dict[tuple[str, str | None], Separation] = {}  #: by the values of a config, and its attention


def small_model(
    config: Any, attention: str | None, build: Callable[[Any], nn.Module] | None = None
) -> tuple[Any, nn.Module, Tensor]:
    """Return a small model of the class and settings of a config, with its own config and its logits for
    `trial_tokens`.

    Call it inside `unnoticed`. The arguments are those of `separation_of`, and the attention implementation.

    Raises:
        LookupError: none can be built.
    """
    build, failure = build or _build, ""
    for sizes in _SMALLER:
        try:
            small = type(config)(**_shrunk(_values(config), sizes))
            small._attn_implementation = attention
            _check_small(small, build)
            model = _randomised(build(small))
            return small, model, logits_of(model, trial_tokens(), {"use_cache": False})
        except Exception as error:  # of code that is not ours: this size does not exist
            failure = described(error)
    raise LookupError(failure)


def _values(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in ("model_type", "dtype")}


def _refusal(config: Any, reason: str) -> UserError:
    return UserError(
        f"data.document_mask: expected false for model type {config.model_type!r}, found true; {reason}. Set "
        f"{ONE_OR_UNMASKED}"
    )


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# ---------------------------------------------------------------------------------------------------------------
# The computation

_LENGTHS = ((11, 9, 12, 4), (6, 17, 13, 0))
_VOCABULARY = 64
#: One in the middle, the last one, and one of the other sample, whose attention windows are shorter than they are.
_EXAMINED = ((0, 1), (0, 2), (1, 1))
#: Parts of the largest logit. Rounding: float32, where experts get few tokens or sums are of another length. A leak is
#: five orders larger than the first, in layers with weights of this size.
_ROUNDING, _ANOTHER_LENGTH, _LEAK = 1e-5, 1e-3, 1e-3


@functools.cache  # not at import, which may be inside a trace or with another default device
def trial_documents() -> Tensor:
    """Return the number of its document for each token of a trial, int64 [samples, tokens]."""
    return torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in _LENGTHS])


@functools.cache
def trial_tokens() -> Tensor:
    """Return the tokens of a trial, int64 [samples, tokens]."""
    shape = trial_documents().shape
    return torch.randint(2, _VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def _first_that_separates(config: Any, small: Any, model: nn.Module, plain: Tensor) -> Separation:
    # Where the config leaves it open, transformers has chosen what the class supports.
    chosen = getattr(getattr(model, "config", small), "_attn_implementation", None)
    mask = "additive" if chosen == "eager" else "boolean"
    window = getattr(small, "sliding_window", None) or 0
    ways = [
        Separation(positions=True, mask="none"),
        Separation(positions=True, mask=mask),
        Separation(positions=False, mask=mask),
        *([Separation(positions=True, mask=mask, window=window)] if window else []),
    ]
    reasons = []
    if not any(
        _differ(plain, logits_of(model, _others(p), {"use_cache": False}), p, _LEAK) for p in _EXAMINED
    ):
        raise _refusal(
            config, "its small model does not mix tokens, so nothing shows whether documents stay apart"
        )
    for way in ways:
        try:
            reason = _leak(model, way)
        except Exception as error:  # this argument is none of forward's
            reason = f"forward raises {described(error)}"
        if reason is None:
            return way
        reasons.append(reason)
    raise _refusal(config, f"in a small model of its kind {reasons[0]}")


def _leak(model: nn.Module, way: Separation) -> str | None:
    """Return the fault of a way to separate documents, in words; None: it works."""
    arguments = way.arguments(trial_documents())
    together = logits_of(model, trial_tokens(), arguments)
    if not together.isfinite().all():
        return "logits are not finite"
    for place in _EXAMINED:
        if _differ(together, logits_of(model, _others(place), arguments), place, _ROUNDING):
            return "the tokens of one document change the logits of another"
    for place in _EXAMINED:
        own = _own(place)
        alone = logits_of(model, trial_tokens()[own].unsqueeze(0), {"use_cache": False})
        if (together[own] - alone[0]).abs().max() > _ANOTHER_LENGTH * alone.abs().max():
            return "a document among others has other logits than alone"
    return None


def _own(place: tuple[int, int]) -> Tensor:
    own = torch.zeros(trial_documents().shape, dtype=torch.bool)
    own[place[0]] = trial_documents()[place[0]] == place[1]
    return own


def _others(place: tuple[int, int]) -> Tensor:
    """Another token for every token of every other document."""
    return torch.where(_own(place), trial_tokens(), 2 + (trial_tokens() + 7) % (_VOCABULARY - 2))


def _differ(one: Tensor, other: Tensor, place: tuple[int, int], part: float) -> bool:
    own = _own(place)
    return not bool((one[own] - other[own]).abs().max() <= part * one[own].abs().max())


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    logits: Tensor = model(input_ids=tokens, **arguments).logits
    return logits


@contextmanager
def unnoticed() -> Iterator[None]:
    """Random numbers, the default dtype and device, and warnings are afterwards as before."""
    dtype = torch.get_default_dtype()
    verbosity = _transformers_logging().get_verbosity()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _transformers_logging().set_verbosity_error()
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            _transformers_logging().set_verbosity(verbosity)


def _transformers_logging() -> Any:
    from transformers.utils import logging

    return logging


def _build(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=config._attn_implementation
    )
    return model


@torch.no_grad()
def _randomised(model: nn.Module) -> nn.Module:
    """In evaluation, in float32, and with every parameter large enough for its layer to matter."""
    model = model.float().eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


# ---------------------------------------------------------------------------------------------------------------
# Small models of the same kind

#: A model with more parameters takes too long to draw.
_MOST_PARAMETERS = 100_000_000
#: Sizes that do not decide how tokens mix. All layers stay, as their kinds may follow from their numbers.
_WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim_model")
_SIZES = {
    "vocab_size": _VOCABULARY, "n_inner": 32, "ffn_dim": 32, "ffn_hidden_size": 32, "d_ff": 32, "dff": 32, "dim_ff": 32,
    "decoder_ffn_dim": 32, "q_lora_rank": 32, "kv_lora_rank": 16, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2,
    "moe_k": 2, "n_group": 1, "topk_group": 1, "vocab_size_per_layer_input": _VOCABULARY,
}  # fmt: skip
#: Ends of the names of what limits how far a token sees. Less than the documents looked at, so that it shows.
_LIMITS = ("window", "window_size", "chunk_size", "index_topk")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")


def _small_as_it_is(values: Mapping[str, Any]) -> dict[str, int]:
    return {"vocab_size": _VOCABULARY}


def _smaller(values: Mapping[str, Any]) -> dict[str, int]:
    heads, width = _first_of(values, _HEADS) or 1, _first_of(values, _WIDTHS) or 64
    grouped = (_first_of(values, _KV_HEADS) or heads) != heads
    sizes = _SIZES | {key: 32 for key in values if key.endswith("intermediate_size")}
    sizes |= dict.fromkeys(_HEADS, 2) | dict.fromkeys(_KV_HEADS, 1 if grouped else 2)
    # Rotary settings may have a number for each pair of a head, so heads keep their width.
    own_width = "qk_rope_head_dim" in values or values.get("head_dim") not in (None, width // heads)
    return sizes | dict.fromkeys(_WIDTHS, 64 if own_width else 2 * (width // heads))


#: From the values of a config to the most that some may be; the first of which a model can be built decides.
_SMALLER: tuple[Callable[[Mapping[str, Any]], dict[str, int]], ...] = (_small_as_it_is, _smaller)


def _shrunk(
    values: Mapping[str, Any], sizes: Callable[[Mapping[str, Any]], dict[str, int]]
) -> dict[str, Any]:
    """Return the values of a config and of the configs inside it, such as the language model's beside the image
    model's."""
    most, small = sizes(values), dict(values)
    for key, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            small[key] = _shrunk(value, sizes)
        elif key.endswith("_token_id") and value is not None:
            small[key] = 0  # its number may be beyond the small vocabulary
        elif isinstance(value, int) and not isinstance(value, bool):
            limit = 4 if key.endswith(_LIMITS) else most.get(key, value)
            small[key] = min(value, limit)
    return small


def _check_small(config: Any, build: Callable[[Any], nn.Module]) -> None:
    """Raises ValueError for a model that is not."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build(config).parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"it would have {count:,} parameters")


def _first_of(values: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((values[key] for key in keys if isinstance(values.get(key), int)), None)
