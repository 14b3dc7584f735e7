"""The sections and keys of CONFIG.toml: types, ranges, defaults, meanings. `schema` puts them together.

Nothing here imports torch, so that `--help` and a mistyped key are answered at once.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from shardwright.extend import layouts, memories, strategies
from shardwright.train.errors import UserError
from shardwright.train.models.kinds import kind_named, kinds
from shardwright.train.models.presets import RopeScaling, Shape
from shardwright.train.one_of import UNKNOWN_KEY, WRONG_NAME, OneOf, summaries
from shardwright.train.optimizers import optimizers
from shardwright.train.sinks import sinks as named_sinks

# No float16: its gradients underflow without loss scaling, which the trainer does not have.
DType = Literal["float32", "bfloat16"]
# strict=False on the outside only: TOML has lists where an immutable model wants tuples.
Paths = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the file: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class RunConfig(Section):
    """The name, folder, seed and device of the run."""

    name: str = Field(
        default="llama-debug", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$",
        description="Name of the run: letters, digits, '.', '_' and '-'. Part of the default folder's name.",
    )  # fmt: skip
    dir: str = Field(
        default="", description="Folder of the run. Empty: runs/NAME-TIME below the current folder."
    )
    seed: int = Field(
        default=0, ge=0, le=2**32 - 1, description="Seed of the initial weights and of the sample order."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Device of the computation. auto: GPUs if the machine has any, else the CPU.",
    )
    sample_tokens: int = Field(
        default=160, ge=0,
        description="Tokens that the model writes after the last step. Each token needs one forward pass. 0: none.",
    )  # fmt: skip


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
            "a config.json."
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
        default=None, ge=1, description="Tokens of the vocabulary; at least the tokenizer's."
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

    def shape(self) -> Shape:
        """The preset with this section's own numbers in place.

        Raises ValueError where the numbers do not fit one another, or the kind.
        """
        kind = kind_named(self.kind)
        values = {name: value for name, value in self if value is not None and name not in ("kind", "preset")}
        for name in sorted(values.keys() - kind.numbers):
            owners = " or ".join(repr(its.name) for its in kinds if name in its.numbers)
            raise ValueError(
                f"{name}: kind {self.kind!r} has none; expected it with kind {owners} only, found {values[name]!r}"
            )
        scaling = self.rope_scaling
        if scaling is not None:
            values["rope_scaling"] = RopeScaling(**dict(scaling)) if scaling.factor > 1 else None
        return kind.shape_of(self.preset, values)  # type: ignore[no-any-return]

    def resolved(self) -> ModelConfig:
        """The same model with every number written out, so that nothing depends on the preset any more."""
        shape: Any = self.shape()
        numbers = dict(vars(shape.resolved() if hasattr(shape, "resolved") else shape))
        if "rope_scaling" in numbers:
            scaling = numbers["rope_scaling"]
            # A factor of 1 stands for none: without the table the preset's would come back.
            table = RopeScalingConfig(factor=1.0) if scaling is None else RopeScalingConfig(**vars(scaling))
            numbers["rope_scaling"] = table
        return self.model_copy(update=numbers)


DataKind = Literal["documents", "conversations", "completions"]
_KIND = (
    "What a row holds. documents: a text. conversations: messages with role and content, of which the assistant's are "
    "trained. completions: a prompt and a text, of which the text is trained."
)


class SourceConfig(Section):
    """One of several sources, with its share of the tokens of the run."""

    path: str | Paths = Field(min_length=1, description="As data.source.")
    weight: float = Field(
        gt=0,
        description="Share of the tokens of the run that come from this source, in proportion to the others.",
    )
    kind: DataKind = Field(default="documents", description=_KIND)
    text_key: str = Field(default="text", min_length=1, description="Key or column of a document's text.")
    messages_key: str = Field(default="messages", min_length=1, description="Key or column of the messages.")
    prompt_key: str = Field(default="prompt", min_length=1, description="Key or column of the prompt.")
    completion_key: str = Field(
        default="completion", min_length=1, description="Key or column of the text after the prompt."
    )


class DataConfig(Section):
    """The training data and its tokenizer."""

    source: str | Paths = Field(
        default="pydoc",
        min_length=1,
        description=(
            "pydoc: the English reference text that is part of every CPython. Otherwise the path of a .txt, .jsonl, "
            ".parquet, .arrow or .npy file, of a folder of a data set, a pattern such as data/*.jsonl, a URL, or "
            "a list "
            "of these, read in that order."
        ),
    )
    sources: Annotated[tuple[SourceConfig, ...], Field(strict=False)] = Field(
        default=(),
        description=(
            "Several sources with weights, as tables [[data.sources]] with path, weight and the keys below, in place "
            "of data.source."
        ),
    )
    kind: DataKind = Field(default="documents", description=_KIND)
    text_key: str = Field(
        default="text", min_length=1, description="Key or column of a document's text in a file with rows."
    )
    messages_key: str = Field(
        default="messages", min_length=1, description="Key or column of the messages of a conversation."
    )
    prompt_key: str = Field(
        default="prompt", min_length=1, description="Key or column of the prompt of a completion."
    )
    completion_key: str = Field(
        default="completion", min_length=1, description="Key or column of the text after the prompt."
    )
    tokenizer: str = Field(
        default="bytes",
        min_length=1,
        description=(
            "bytes: every byte of the UTF-8 text is a token. Otherwise the path of a tokenizer.json or of its folder, "
            "or the name of a model on the Hugging Face hub."
        ),
    )
    chat_template: str = Field(
        default="", description="File with the chat template of conversations. Empty: the tokenizer's own."
    )
    packing: Literal["split", "best_fit", "none"] = Field(
        default="split",
        description=(
            "How documents fill the samples of seq_len tokens. split: one after the other, cut where a sample ends. "
            "best_fit: whole documents that fit together, and padding. none: one document in each sample."
        ),
    )
    document_mask: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "Whether a token sees only its own document in a sample of several. auto: yes, except for text that is "
            "tokenised as bytes and split."
        ),
    )
    validation_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Fraction of each source, taken from its end, that is used only for validation.",
    )
    cache: str = Field(
        default="",
        description="Folder for tokens, which are made once. Empty: shardwright/tokens in the user's cache folder.",
    )
    workers: int = Field(
        default=1,
        ge=0,
        description="Threads of each rank that prepare batches ahead of the step. 0: each batch when it is needed.",
    )

    @model_validator(mode="after")
    def _keys_fit(self) -> DataConfig:
        if self.sources:
            for key in ("source", "kind", "text_key", "messages_key", "prompt_key", "completion_key"):
                value, default = getattr(self, key), type(self).model_fields[key].default
                if value != default:
                    raise ValueError(
                        f"{key}: expected it in each of data.sources, found {value!r} beside them; move it there"
                    )
        only = {"none": False, "best_fit": True}.get(self.packing)
        if only is not None and self.document_mask not in ("auto", only):
            why = "one document" if self.packing == "none" else "whole documents that nothing else separates"
            raise ValueError(
                f"document_mask: expected 'auto' with packing {self.packing!r}, which puts {why} in a sample, found "
                f"{str(self.document_mask).lower()}"
            )
        return self

    @property
    def separates(self) -> bool:
        """Whether tokens must see their own document alone in samples of several."""
        if self.packing != "split":
            return self.packing == "best_fit"
        if self.document_mask == "auto":
            kinds = {self.kind, *(source.kind for source in self.sources)}
            return self.tokenizer != "bytes" or kinds != {"documents"}
        return self.document_mask

    def resolved(self) -> DataConfig:
        """The same data with absolute paths, to be found from any folder."""
        changes: dict[str, Any] = {"source": _absolute(self.source)}
        changes["sources"] = tuple(
            source.model_copy(update={"path": _absolute(source.path)}) for source in self.sources
        )
        for key in ("tokenizer", "chat_template", "cache"):
            if (value := getattr(self, key)) != "bytes" and os.path.exists(value):
                changes[key] = os.path.abspath(value)
        return self.model_copy(update=changes)


def _absolute(source: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if not isinstance(source, str):
        return tuple(str(_absolute(each)) for each in source)
    return source if source == "pydoc" or "://" in source else os.path.abspath(source)


class TrainConfig(Section):
    """Steps, batch sizes and compilation."""

    steps: int = Field(default=300, ge=1, description="Optimizer steps in all.")
    seq_len: int = Field(default=256, ge=1, description="Tokens per sequence.")
    global_batch: int = Field(default=16, ge=1, description="Sequences per optimizer step, over all ranks.")
    micro_batch: int = Field(
        default=8, ge=1,
        description="Sequences per rank and forward pass. global_batch / (ranks x micro_batch) passes are "
        "accumulated per step; this must be a whole number.",
    )  # fmt: skip
    max_norm: float = Field(
        default=1.0,
        ge=0,
        description=(
            "Gradients are scaled down to this global norm. 0: the norm is measured, but gradients are never scaled."
        ),
    )
    accumulate: Literal["communicate", "hold"] = Field(
        default="communicate",
        description=(
            "When to reduce the gradients of micro-batches. communicate: after each one (least memory). hold: only "
            "after the last one (least communication)."
        ),
    )
    cuda_graph: bool = Field(
        default=False,
        description=(
            "Capture forward and backward of a step in a CUDA graph and replay it, so that the host does not launch "
            "each kernel. Needs GPUs, the engine shardwright, and a model whose shapes do not depend on values."
        ),
    )
    compile: Literal["none", "inductor", "aot_eager", "eager"] = Field(
        default="none",
        description=(
            "Compile each block with torch.compile and this backend, as one graph. Only inductor makes the block "
            "faster."
        ),
    )
    float8: Literal["none", "tensorwise", "rowwise"] = Field(
        default="none",
        description=(
            "Multiply in float8 in the linear layers of blocks, by this recipe of torchao. tensorwise: one scale for "
            "each tensor; weights are also gathered in float8. rowwise: one scale for each row. Needs a GPU with "
            "float8, parallel.param_dtype = bfloat16, and shardwright[float8]."
        ),
    )
    memory_snapshot: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = Field(
        default=(),
        description=(
            "Steps, such as [3], in which every rank records the history of its GPU memory. Open the files in the "
            "run's folder at pytorch.org/memory_viz."
        ),
    )

    def accumulation_steps(self, ranks: int) -> int:
        """Micro-batches per rank and optimizer step. Raises UserError where that is not a whole number."""
        problem = self.batch_problem(ranks)
        if problem:
            raise UserError(problem)
        return self.global_batch // (ranks * self.micro_batch)

    def batch_problem(self, ranks: int) -> str | None:
        """What is wrong with the batch sizes on so many ranks, in a line; `None` if nothing is."""
        unit = ranks * self.micro_batch
        if self.global_batch % unit == 0:
            return None
        below, above = self.global_batch // unit * unit, -(-self.global_batch // unit) * unit
        nearest = f"{below} or {above}" if below else f"{above}"
        if self.global_batch % ranks == 0:
            share = self.global_batch // ranks
            micro = max(m for m in range(1, min(share, self.micro_batch) + 1) if share % m == 0)
            nearest += f", or train.micro_batch = {micro}"
        who = "one rank" if ranks == 1 else f"{ranks} ranks"
        return (
            f"train.global_batch: expected a multiple of {who} x train.micro_batch = {self.micro_batch} "
            f"(that is {unit}), found {self.global_batch}; nearest that fit: {nearest}"
        )


class ActivationConfig(Section):
    """Which activations are kept from forward to backward. The others are computed again, with the same precision."""

    checkpoint: Literal["none", "full", "layers", "ops", "budget"] = Field(
        default="none",
        description=(
            "Activation checkpointing. full: keep only the inputs of each block. layers: the same, for every k-th "
            "block. ops: keep also the results of matrix products and attention. budget: the compiler chooses within "
            "activations.budget; needs train.compile = inductor."
        ),
    )
    every: int = Field(
        default=2,
        ge=1,
        description="For checkpoint = layers: checkpoint every k-th block, beginning with the first.",
    )
    budget: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description=(
            "For checkpoint = budget: the fraction of the activations that may be kept. 0 means full, 1 means none."
        ),
    )

    @model_validator(mode="after")
    def _keys_belong_to_the_mode(self) -> ActivationConfig:
        for key, mode in (("every", "layers"), ("budget", "budget")):
            value, default = getattr(self, key), type(self).model_fields[key].default
            if self.checkpoint != mode and value != default:
                raise ValueError(
                    f"{key}: only for checkpoint = {mode!r}; with {self.checkpoint!r} expected {default}, found "
                    f"{value}"
                )
        return self


class OptimizerConfig(Section):
    """The optimizer and the course of its learning rate."""

    name: Annotated[str, OneOf(optimizers)] = Field(default="adamw", description=summaries(optimizers))
    lr: float = Field(default=3e-3, gt=0, description="Peak learning rate.")
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95),
        description="Decay of the running means of the gradient and of the squared gradient.",
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator of the update.")
    weight_decay: float = Field(
        default=0.1, ge=0, description="Weight decay of matrices; vectors are not decayed."
    )
    momentum: Beta = Field(
        default=0.95, description="For muon: decay of the running mean of its matrices' gradients."
    )
    ns_steps: int = Field(
        default=5, ge=1, lt=100, description="For muon: Newton-Schulz iterations per step and matrix."
    )
    in_backward: bool = Field(
        default=False,
        description=(
            "Step each unit in backward as soon as its gradients are reduced, and free these gradients. Needs the "
            "engine shardwright and train.max_norm = 0, since the norm of all gradients is not known in backward."
        ),
    )
    options: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description=(
            "Further options of a registered optimizer, which `shardwright extensions optimizers` lists. The built-in "
            "optimizers have none."
        ),
    )
    warmup_steps: int = Field(
        default=20,
        ge=0,
        description="Steps over which the learning rate rises to lr. A shorter run ends before the peak.",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine",
        description="Course of the learning rate from the end of the warm-up to the last step.",
    )
    min_lr_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Learning rate of the last step, as a fraction of lr."
    )

    @model_validator(mode="after")
    def _keys_belong_to_the_optimizer(self) -> OptimizerConfig:
        own = optimizers.get(self.name)
        if self.in_backward and not own.in_backward:
            why = f", which steps whole {own.whole}" if own.whole else ""
            raise ValueError(f"in_backward: expected false with optimizer {self.name!r}{why}, found true")
        if problem := own.options_problem(self.options):
            raise ValueError(problem)
        for key in ("momentum", "ns_steps"):
            value, default = getattr(self, key), type(self).model_fields[key].default
            if self.name != "muon" and value != default:
                raise ValueError(
                    f"{key}: optimizer {self.name!r} does not have this key; expected {default}, found {value}. Only "
                    "muon has it"
                )
        return self


class ParallelConfig(Section):
    """The engine that spreads the model over the ranks, and its precisions."""

    engine: Literal["shardwright", "fsdp2", "fsdp1", "ddp", "none"] = Field(
        default="shardwright",
        description="shardwright, or an engine of torch for comparison. none: a plain model on one rank.",
    )
    param_dtype: DType = Field(
        default="float32", description="Precision of the computation; the stored weights are float32."
    )
    reduce_dtype: DType = Field(
        default="float32", description="Precision in which gradients are summed over the ranks."
    )
    accumulate_dtype: DType | Literal["auto"] = Field(
        default="auto",
        description=(
            "Precision of the gradients that the engine shardwright holds between micro-batches. auto: reduce_dtype."
        ),
    )
    grad_dtype: DType | Literal["auto"] = Field(
        default="auto",
        description=(
            "Precision of the gradients that the optimizer gets from the engine shardwright. auto: float32, as for "
            "stored weights. bfloat16 halves their memory; of the built-in optimizers adamw8bit supports it."
        ),
    )
    keep_float32: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(),
        description=(
            'Patterns of names, such as ["*norm.weight", "*.router.*"]. The engine shardwright gathers these '
            "parameters in float32, whatever param_dtype is. Allowed: norms, routers, steps and decays of Mamba-2."
        ),
    )
    full_precision_in_eval: bool = Field(
        default=False,
        description="Validate in float32, whatever param_dtype is. Only for the engine shardwright.",
    )
    reshard_after_forward: Literal["default", "always", "never"] | Annotated[int, Field(ge=1)] = Field(
        default="default",
        description=(
            "Which gathered weights to free after the forward pass. default: all except the root's and the last "
            "block's. always: all. never: none (more memory, less communication). A number k: as default, but each "
            "group of k neighbouring ranks keeps the blocks' weights, one k-th on each rank, for the backward pass."
        ),
    )
    strategy: Annotated[str, OneOf(strategies)] = Field(
        default="zero3",
        description=f"What the engine shardwright shards over the ranks. {summaries(strategies)}",
    )
    replicas: int = Field(
        default=1,
        ge=1,
        description="Number of groups of ranks that each hold a whole model. hsdp and hfsdp need at least 2.",
    )
    tensor: int = Field(
        default=1,
        ge=1,
        description=(
            "Number of neighbouring ranks that share every layer and the sequence: tensor and sequence parallelism. "
            "These groups divide the data."
        ),
    )
    expert: int = Field(
        default=1,
        ge=1,
        description=(
            "Number of neighbouring ranks that share the experts of every layer: expert parallelism. Each rank has "
            "different data. Only for the engine shardwright."
        ),
    )
    layout: Annotated[str, OneOf(layouts)] | Annotated[int, Field(ge=1)] = Field(
        default="per_parameter",
        description=(
            f"Where the engine shardwright cuts parameters. {summaries(layouts)} A number: like ragged, but cut only "
            "between blocks of this many rows."
        ),
    )
    memory: Annotated[str, OneOf(memories)] = Field(
        default="dynamic",
        description=f"How the engine shardwright allocates the memory of a step. {summaries(memories)}",
    )
    prefetch: (
        Annotated[int, Field(ge=0)]
        | Annotated[str, Field(pattern=r"^\d+ ?[KMG]iB$", description='bytes, such as "512 MiB"')]
    ) = Field(
        default=1,
        description=(
            'Number of units that the engine shardwright gathers ahead, or number of bytes, such as "512 MiB".'
        ),
    )

    offload: Literal["none", "cpu", "optimizer"] = Field(
        default="none",
        description=(
            "What the engine shardwright keeps in the CPU's memory. cpu: parameters, gradients and optimizer state; "
            "the optimizer steps on the CPU (muon: on the device). optimizer: only the optimizer state, which moves "
            "to the device and back in each step."
        ),
    )

    @model_validator(mode="after")
    def _fits_the_engine(self) -> ParallelConfig:
        ours = (
            "strategy",
            "replicas",
            "expert",
            "layout",
            "memory",
            "prefetch",
            "offload",
            "accumulate_dtype",
            "grad_dtype",
            "keep_float32",
            "full_precision_in_eval",
        )
        for key in ours:
            value, default = getattr(self, key), type(self).model_fields[key].default
            if self.engine != "shardwright" and value != default:
                raise ValueError(
                    f"{key}: expected {default!r} with engine {self.engine!r}, found {value!r}; only the engine "
                    "shardwright supports other values"
                )
        if self.keep_float32 and self.param_dtype == "float32":
            raise ValueError(
                "keep_float32: expected no patterns with param_dtype 'float32', since all parameters are then "
                "gathered in float32"
            )
        if (
            "auto" not in (self.grad_dtype, self.accumulate_dtype)
            and self.grad_dtype != self.accumulate_dtype
        ):
            raise ValueError(
                f"grad_dtype: expected 'auto' or accumulate_dtype, {self.accumulate_dtype!r}, found "
                f"{self.grad_dtype!r}; reduced micro-batches add up in the gradients"
            )
        if self.engine not in ("shardwright", "fsdp2") and self.tensor > 1:
            raise ValueError(
                f"tensor: engine {self.engine!r} has no tensor parallelism; expected 1, found {self.tensor}"
            )
        strategy = strategies.get(self.strategy)
        if strategy.axes == 2 and self.replicas < 2:
            raise ValueError(
                f"replicas: expected at least 2 with strategy {self.strategy!r}, found {self.replicas}"
            )
        if strategy.axes is None and self.replicas > 1:
            raise ValueError(
                f"replicas: expected 1 with strategy {self.strategy!r}, which treats all ranks alike, found "
                f"{self.replicas}; set strategy = 'hsdp' for groups of ranks that each hold a whole model"
            )
        reshard = self.reshard_after_forward
        if strategy.keeps_parameters and any(strategy.stages) and reshard not in ("default", "never"):
            raise ValueError(
                f"reshard_after_forward: strategy {self.strategy!r} keeps parameters whole until the optimizer's step; "
                f"expected 'default' or 'never', found {reshard!r}"
            )
        if self.engine not in ("shardwright", "fsdp2") and isinstance(reshard, int):
            raise ValueError(
                f"reshard_after_forward: engine {self.engine!r} does not support a number; expected 'default', "
                f"'always' or 'never', found {reshard}"
            )
        return self


class ValidationConfig(Section):
    """The loss on text that is not in the training set."""

    every: int = Field(default=100, ge=0, description="Steps between validations. 0: never.")
    batches: int = Field(default=8, ge=1, description="Global batches per validation.")


class CheckpointConfig(Section):
    """Checkpoints during the run. A checkpoint is always written at the end."""

    every: int = Field(default=100, ge=0, description="Steps between checkpoints. 0: only at the end.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints to keep; older ones are deleted.")


class LogConfig(Section):
    """The log and the metrics."""

    every: int = Field(default=1, ge=1, description="Steps between lines of the log.")
    sinks: Annotated[tuple[Annotated[str, OneOf(named_sinks)], ...], Field(strict=False)] = Field(
        default=("tensorboard",),
        description=f"Where metrics go beside metrics.jsonl and the terminal. {summaries(named_sinks)}",
    )
    project: str = Field(
        default="",
        description=(
            "Project of wandb and trackio, experiment of mlflow. Empty: WANDB_PROJECT, TRACKIO_PROJECT or "
            "MLFLOW_EXPERIMENT_NAME, else shardwright."
        ),
    )

    @model_validator(mode="after")
    def _sinks_differ(self) -> LogConfig:
        names: list[str] = []
        for name in self.sinks:
            same = next((other for other in names if named_sinks.get(other) is named_sinks.get(name)), None)
            if same is not None:
                twice = f"{name!r} twice" if same == name else f"{same!r} and {name!r}, which are one sink"
                raise ValueError(
                    f"sinks: found {twice}. Each record would be written twice. Name each sink once"
                )
            names.append(name)
        return self

    @model_validator(mode="before")
    @classmethod
    def _reads_tensorboard(cls, values: Any) -> Any:
        """Runs of version 0.1 have `tensorboard = true` or `false`."""
        if isinstance(values, dict) and isinstance(values.get("tensorboard"), bool) and "sinks" not in values:
            values = dict(values)
            values["sinks"] = ["tensorboard"] if values.pop("tensorboard") else []
        return values
