"""The section `[model]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from shardwright.train.config.catalog.kinds import Kind, kind_named, kinds
from shardwright.train.config.catalog.registry_names import UNKNOWN_KEY, WRONG_NAME, OneOf, summaries
from shardwright.train.config.sections.base import Section
from shardwright.train.config.shapes.presets import RopeScaling, Shape


class RopeScalingConfig(Section):
    """Stretching of the rotary frequencies, as in Llama 3.1. A factor of 1 turns it off."""

    factor: float = Field(
        default=8.0,
        ge=1,
        description="Factor by which the longest wavelengths are stretched; 1: no stretching.",
    )
    low_freq_factor: float = Field(
        default=1.0,
        gt=0,
        description=(
            "Wavelengths above original_max_seq_len / low_freq_factor are stretched by the whole factor."
        ),
    )
    high_freq_factor: float = Field(
        default=4.0,
        gt=0,
        description="Wavelengths below original_max_seq_len / high_freq_factor stay as they are.",
    )
    original_max_seq_len: int = Field(
        default=8192, ge=1, description="Context length of pre-training, in tokens."
    )


class ModelConfig(Section):
    """The model: a preset whose numbers the other keys replace, one of transformers (path) or your own (target).

    A kind that is not built in has other keys: the fields of its shape's class.
    """

    model_config = ConfigDict(extra="allow")

    kind: Annotated[str, OneOf(kinds)] = Field(
        default="llama",
        description=f"Architecture. {summaries(kinds)}",
    )
    preset: str = Field(
        default="debug",
        description=(
            "Shape to start from. For llama: debug, 150M, 1B and 3B (Llama 3.2), 8B, 70B and 405B (Llama 3.1). For "
            "hybrid: debug, 150M, 9B (Nemotron Nano 9B v2). hf and python have none, other kinds their own."
        ),
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Only for hf: the folder of a model of transformers, or its name on the Hugging Face hub: owner/model or "
            "owner/model@revision."
        ),
    )
    weights: Literal["pretrained", "random"] | None = Field(
        default=None,
        description=(
            "Only for hf. pretrained: begin with the safetensors in path. random: train from scratch; path needs only "
            "a config.json. Unset: pretrained."
        ),
    )
    target: str | None = Field(
        default=None,
        min_length=1,
        description="Only for python: import path of the function that builds your model, such as my_model:build.",
    )
    arguments: dict[str, bool | int | float | str] | None = Field(
        default=None, description="Only for python: keyword arguments of the function."
    )
    blocks: str | None = Field(
        default=None,
        description=(
            "Only for hf and python: name of the list of the model's layers, such as model.layers. Default: it is "
            "found."
        ),
    )
    dim: int | None = Field(default=None, ge=1, description="Width of the residual stream.")
    n_layers: int | None = Field(default=None, ge=1, description="Number of blocks. Only for llama.")
    pattern: str | None = Field(
        default=None,
        description=(
            "The layers in their order: M for Mamba-2, * for attention, E for a mixture of experts, - for a dense "
            "MLP. Only for hybrid, like all keys from mamba_heads on."
        ),
    )
    n_heads: int | None = Field(default=None, ge=1, description="Query heads per block.")
    n_kv_heads: int | None = Field(
        default=None, ge=1, description="Key and value heads per block; divides n_heads."
    )
    head_dim: int | None = Field(
        default=None,
        ge=1,
        description="Width of an attention head. Only for hybrid; for llama it is dim / n_heads.",
    )
    ffn_dim: int | None = Field(default=None, ge=1, description="Hidden width of the feed-forward part.")
    vocab_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of the vocabulary, at least the tokenizer's. Unset: as many, or the preset's for bytes.",
    )
    max_seq_len: int | None = Field(default=None, ge=1, description="Longest sequence, in tokens.")
    rope_theta: float | None = Field(
        default=None, gt=0, description="Base of the rotary frequencies. Only for llama."
    )
    rope_scaling: RopeScalingConfig | None = Field(
        default=None, description="Stretch the rotary frequencies for long contexts, as in Llama 3.1."
    )
    tied_embeddings: bool | None = Field(
        default=None, description="Use the embedding matrix as the output layer too."
    )
    norm_eps: float | None = Field(default=None, gt=0, description="Added to the mean square inside RMSNorm.")
    mamba_heads: int | None = Field(default=None, ge=1, description="Heads of a Mamba-2 layer.")
    mamba_head_dim: int | None = Field(default=None, ge=1, description="Width of a Mamba-2 head.")
    mamba_groups: int | None = Field(
        default=None, ge=1, description="Groups of heads that share their B and C; divides mamba_heads."
    )
    mamba_state: int | None = Field(default=None, ge=1, description="Width of the state of each channel.")
    conv_width: int | None = Field(
        default=None, ge=1, description="Width, in tokens, of the convolution of a Mamba-2 layer."
    )
    chunk_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that the scan computes at once. Changes only speed and memory.",
    )
    n_experts: int | None = Field(default=None, ge=1, description="Number of experts in a mixture.")
    top_k: int | None = Field(default=None, ge=1, description="Number of experts that each token uses.")
    expert_dim: int | None = Field(default=None, ge=1, description="Hidden width of an expert.")
    shared_dim: int | None = Field(
        default=None,
        ge=0,
        description=("Hidden width of the shared expert, which gets every token. 0: no shared expert."),
    )
    balance_weight: float | None = Field(
        default=None,
        ge=0,
        description="Weight of the load-balancing loss. This loss is 1 if all experts get the same load.",
    )
    mtp_pattern: str | None = Field(
        default=None,
        description=(
            "Layers of the head that predicts the token after the next, with the letters of pattern. Empty: no such "
            "head."
        ),
    )
    mtp_weight: float | None = Field(
        default=None, ge=0, description="Weight of the loss of the head in mtp_pattern."
    )

    @model_validator(mode="before")
    @classmethod
    def _own_keys_are_of_the_kind(cls, values: Any) -> Any:
        own = (
            {key: values[key] for key in values if key not in cls.model_fields}
            if isinstance(values, dict)
            else {}
        )
        try:
            kind = kinds.get(values.get("kind", "llama") if own else "llama")
        except (ValueError, TypeError):
            return values  # the key itself is wrong, and said to be
        for key, value in own.items():
            if key not in kind.numbers:
                raise PydanticCustomError(UNKNOWN_KEY, "unknown key", {"key": key, "value": value})
            expected = kind.type_of(key)
            try:
                TypeAdapter(expected, config=ConfigDict(strict=True)).validate_python(value)
            except ValidationError:
                reason = f"expected {getattr(expected, '__name__', expected)}, found {value!r}"
                raise PydanticCustomError(WRONG_NAME, "{reason}", {"reason": reason, "key": key}) from None
        return values

    @model_validator(mode="after")
    def _shape_is_possible(self) -> ModelConfig:
        self.shape()
        return self

    @property
    def facts(self) -> Kind:
        """The kind, which knows what its models support."""
        return kind_named(self.kind)

    def shape(self) -> Shape:
        """Return the preset with this section's own numbers in place.

        Raises ValueError where the numbers do not fit one another, or the kind.
        """
        kind = self.facts
        values = {name: value for name, value in self if value is not None and name not in ("kind", "preset")}
        for name in sorted(values.keys() - kind.numbers):
            owners = " or ".join(repr(its.name) for its in kinds if name in its.numbers)
            raise ValueError(
                f"{name}: kind {self.kind!r} has none; expected it with kind {owners} only, found {values[name]!r}; "
                "remove it"
            )
        scaling = self.rope_scaling
        if scaling is not None:
            values["rope_scaling"] = RopeScaling(**dict(scaling)) if scaling.factor > 1 else None
        return kind.shape_of(self.preset, values)  # type: ignore[no-any-return]

    def resolved(self) -> ModelConfig:
        """Return the same model with every number written out, so that nothing depends on the preset any more."""
        shape: Any = self.shape()
        numbers = dict(vars(shape.resolved() if hasattr(shape, "resolved") else shape))
        if "rope_scaling" in numbers:
            scaling = numbers["rope_scaling"]
            # A factor of 1 stands for none: without the table the preset's would come back.
            table = RopeScalingConfig(factor=1.0) if scaling is None else RopeScalingConfig(**vars(scaling))
            numbers["rope_scaling"] = table
        return self.model_copy(update=numbers)
