"""What a training job can be told: the sections and keys of CONFIG.toml, their types, ranges and defaults.

Reading, overriding, checking and writing configurations live here; acting on them does not. Nothing here
imports torch, so that `--help` and a mistyped key are answered at once.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shardwright.train.errors import UserError
from shardwright.train.models.presets import PRESETS, LlamaConfig, RopeScaling

DType = Literal["float32", "bfloat16", "float16"]
# strict=False on the outside only: TOML has lists where an immutable model wants tuples.
Paths = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the file: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class RunConfig(Section):
    """What the run is called, where it is kept and where it computes."""

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
        default="auto", description="Where to compute. auto: the GPUs where there are any, else the CPU."
    )


class RopeScalingConfig(Section):
    """Stretching of the rotary frequencies, as in Llama 3.1. A factor of 1 turns it off."""

    factor: float = Field(
        default=8.0, ge=1, description="How far the longest wavelengths are stretched; 1 turns it off."
    )
    low_freq_factor: float = Field(
        default=1.0, gt=0, description="Wavelengths beyond original_max_seq_len / this are stretched in full."
    )
    high_freq_factor: float = Field(
        default=4.0, gt=0, description="Wavelengths below original_max_seq_len / this are left alone."
    )
    original_max_seq_len: int = Field(
        default=8192, ge=1, description="Context length of pre-training, in tokens."
    )


class ModelConfig(Section):
    """The model: a preset's shape, in which every other key replaces one number."""

    kind: Literal["llama"] = Field(default="llama", description="Architecture.")
    preset: Literal["debug", "150M", "1B", "3B", "8B", "70B", "405B"] = Field(
        default="debug", description="Shape to start from. 1B, 3B: Llama 3.2; 8B, 70B, 405B: Llama 3.1."
    )
    dim: int | None = Field(default=None, ge=1, description="Width of the residual stream.")
    n_layers: int | None = Field(default=None, ge=1, description="Number of blocks.")
    n_heads: int | None = Field(default=None, ge=1, description="Query heads per block.")
    n_kv_heads: int | None = Field(
        default=None, ge=1, description="Key and value heads per block; divides n_heads."
    )
    ffn_dim: int | None = Field(default=None, ge=1, description="Hidden width of the feed-forward part.")
    vocab_size: int | None = Field(
        default=None, ge=1, description="Tokens of the vocabulary; at least the tokenizer's."
    )
    max_seq_len: int | None = Field(
        default=None, ge=1, description="Longest sequence the rotary tables cover, in tokens."
    )
    rope_theta: float | None = Field(default=None, gt=0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScalingConfig | None = Field(
        default=None, description="Rotary frequencies stretched for long contexts, as in Llama 3.1."
    )
    tied_embeddings: bool | None = Field(
        default=None, description="Use the embedding matrix as the output layer too."
    )
    norm_eps: float | None = Field(default=None, gt=0, description="Added to the mean square inside RMSNorm.")

    @model_validator(mode="after")
    def _shape_is_possible(self) -> ModelConfig:
        self.shape()
        return self

    def shape(self) -> LlamaConfig:
        """The preset with this section's own numbers in place.

        Raises ValueError where the numbers do not fit one another.
        """
        given = {name: value for name, value in self if value is not None and name not in ("kind", "preset")}
        scaling = self.rope_scaling
        if scaling is not None:
            given["rope_scaling"] = RopeScaling(**dict(scaling)) if scaling.factor > 1 else None
        return replace(PRESETS[self.preset], **given)


class DataConfig(Section):
    """The text to learn and how it becomes tokens."""

    source: str | Paths = Field(
        default="pydoc",
        min_length=1,
        description="The word pydoc (the English reference text every CPython carries), the path of a .txt "
        "or .jsonl file, or a list of such paths, read in that order.",
    )
    text_key: str = Field(
        default="text", min_length=1, description="Key of a .jsonl line that holds the document."
    )
    validation_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Last part of the corpus, kept for validation and never trained on.",
    )
    tokenizer: Literal["bytes"] = Field(
        default="bytes", description="bytes: every byte of the UTF-8 text is a token."
    )


class TrainConfig(Section):
    """The amount of work and how it is cut."""

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
        description="Gradients are scaled down to this global norm. 0: measured, never scaled.",
    )
    accumulate: Literal["communicate", "hold"] = Field(
        default="communicate",
        description="While accumulating, reduce the gradients of every micro-batch (communicate: least "
        "memory) or only after the last one (hold: least communication).",
    )

    def accumulation_steps(self, ranks: int) -> int:
        """Micro-batches per rank and optimizer step. Raises UserError where that is not a whole number."""
        problem = self._batch_problem(ranks)
        if problem:
            raise UserError(problem)
        return self.global_batch // (ranks * self.micro_batch)

    def _batch_problem(self, ranks: int) -> str | None:
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


class OptimizerConfig(Section):
    """AdamW and the course of its learning rate."""

    lr: float = Field(default=3e-3, gt=0, description="Peak learning rate.")
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="Decay of the running means of gradient and squared gradient."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator of the update.")
    weight_decay: float = Field(
        default=0.1, ge=0, description="Decay of the matrices; vectors are not decayed."
    )
    warmup_steps: int = Field(
        default=20,
        ge=0,
        description="Steps over which the rate rises to lr. A shorter run ends while it still rises.",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="Course of the rate from the end of the warm-up to the last step."
    )
    min_lr_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Rate of the last step, as a part of lr."
    )


class ParallelConfig(Section):
    """The engine that spreads the model over the ranks, and its precisions."""

    engine: Literal["shardwright", "fsdp2", "fsdp1", "ddp", "none"] = Field(
        default="shardwright",
        description="shardwright, or one of torch's own for comparison; none: one rank, plain model.",
    )
    param_dtype: DType = Field(
        default="float32", description="Precision of the computation; the stored weights are float32."
    )
    reduce_dtype: DType = Field(
        default="float32", description="Precision in which gradients are summed over the ranks."
    )
    reshard_after_forward: Literal["default", "always", "never"] = Field(
        default="default",
        description="Free gathered weights after the forward pass: all but the root's and the last block's "
        "(default), always, or never (more memory, less communication).",
    )


class ValidationConfig(Section):
    """The loss on text the model has not learnt from."""

    every: int = Field(default=100, ge=0, description="Steps between validations. 0: never.")
    batches: int = Field(default=8, ge=1, description="Global batches per validation.")


class CheckpointConfig(Section):
    """What is saved on the way. A checkpoint is always written at the end."""

    every: int = Field(default=100, ge=0, description="Steps between checkpoints. 0: only at the end.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints to keep; older ones are deleted.")


class LogConfig(Section):
    """What is reported."""

    every: int = Field(default=1, ge=1, description="Steps between lines of the log.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard files too.")


class Config(Section):
    """A whole training job: what CONFIG.toml holds."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        longest = self.model.shape().max_seq_len
        if self.train.seq_len > longest:
            raise ValueError(
                f"train.seq_len: expected at most model.max_seq_len = {longest}, found {self.train.seq_len}"
            )
        problem = self.train._batch_problem(ranks=1)
        if problem:
            raise ValueError(problem)
        if self.validation.every and not self.data.validation_fraction:
            raise ValueError(
                f"validation.every: expected 0, as data.validation_fraction = 0 leaves nothing to validate "
                f"on, found {self.validation.every}"
            )
        return self

    def to_toml(self) -> str:
        """The configuration as a TOML file that loads back equal. Keys left to the preset are left out."""
        tables = []
        for name, section in self:
            lines = [
                f"{key} = {_toml(value)}" for key, value in section.model_dump(exclude_none=True).items()
            ]
            tables.append("\n".join([f"[{name}]", *lines]))
        return "\n\n".join(tables) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's strings are TOML's basic strings, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    raise TypeError(f"expected a value TOML can hold, found {value!r}")


# ------------------------------------------------------------------------------
# Keys: what may be set, for --help and for error messages


@dataclass(frozen=True)
class Key:
    """One key of the file: `path` is section.key, `expected` says in words which values it takes."""

    path: str
    expected: str
    default: str
    description: str


def keys() -> Iterator[Key]:
    """Every key of the file in order, keys of nested tables included."""
    for name, info in Config.model_fields.items():
        yield from _keys_of(_table_of(info.annotation), name)


def section_summary(name: str) -> str:
    """What the section of that name is about, in a line."""
    table = _table_of(Config.model_fields[name].annotation)
    return (table.__doc__ or "").splitlines()[0] if table else ""


def _keys_of(table: type[Section] | None, prefix: str) -> Iterator[Key]:
    for name, info in table.model_fields.items() if table else ():
        path, inner = f"{prefix}.{name}", _table_of(info.annotation)
        if inner is not None:
            for key in _keys_of(inner, path):
                yield replace(key, default=f"the preset's ({key.default} if the table is given)")
        else:
            default = "the preset's" if info.default is None else _toml(info.default)
            yield Key(path, _expected(info), default, info.description or "")


def _table_of(annotation: Any) -> type[Section] | None:
    """The model behind an annotation that stands for a table, `None` for a plain value."""
    for choice in get_args(annotation) or (annotation,):
        if isinstance(choice, type) and issubclass(choice, Section):
            return choice
    return None


def _field_at(path: Sequence[str | int]) -> FieldInfo | None:
    """The field that a path of names leads to, or `None` where there is no such key."""
    table: type[Section] | None = Config
    info = None
    for name in path:
        info = table.model_fields.get(str(name)) if table else None
        if info is None:
            return None
        table = _table_of(info.annotation)
    return info


def _expected(info: FieldInfo) -> str:
    return _in_words(info.annotation, info.metadata)


def _in_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [m for part in args[1:] for m in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return _in_words(args[0], [*inner, *metadata])
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(arg, metadata) for arg in args if arg is not type(None))
    if origin is tuple:
        items = (
            "strings" if args[-1] is ... else "numbers" + _range_in_words(args[0].__metadata__[0].metadata)
        )
        return f"a list of {items}" if args[-1] is ... else f"a list of {len(args)} {items}"
    if _table_of(annotation) is not None:
        return "a table"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[annotation]
    return words + _range_in_words(metadata)


def _range_in_words(metadata: Sequence[Any]) -> str:
    bounds = []
    for item in metadata:
        for kind, sign, name in ((Ge, ">=", "ge"), (Gt, ">", "gt"), (Le, "<=", "le"), (Lt, "<", "lt")):
            if isinstance(item, kind):
                bounds.append(f"{sign} {getattr(item, name)}")
    return " " + " and ".join(bounds) if bounds else ""


def nearest_key(path: str) -> str | None:
    """The valid key most like `path`: one of the same section, else one of the same name elsewhere."""
    section, name = _section(path), _name(path)
    all_keys = [key.path for key in keys()]
    if section in map(_section, all_keys):
        near = difflib.get_close_matches(name, [_name(k) for k in all_keys if _section(k) == section], 1)
        if near:
            return f"{section}.{near[0]}"
    elsewhere = difflib.get_close_matches(name, [_name(k) for k in all_keys], 1, cutoff=0.75)
    if elsewhere:
        same_name = [k for k in all_keys if _name(k) == elsewhere[0]]
        return difflib.get_close_matches(path, same_name, 1, cutoff=0.0)[0]
    near = difflib.get_close_matches(path, all_keys, 1, cutoff=0.7)
    return near[0] if near else None


def _section(path: str) -> str:
    return path.rpartition(".")[0]


def _name(path: str) -> str:
    return path.rpartition(".")[2]


# ------------------------------------------------------------------------------
# Reading


def load_config(path: Path, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """The configuration in the TOML file at `path`, with `(section.key, text)` overrides on top.

    The text of an override is read as a TOML value; bare words are strings. Raises UserError, one line, for a
    file that cannot be read, an unknown key, a wrong type, a value out of range or values that do not fit.
    """
    values = _read_toml(path)
    for key, text in overrides:
        _override(values, key, text)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(_one_line(error, path, {key for key, _ in overrides})) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: expected a configuration file, found nothing there") from None
    except IsADirectoryError:
        raise UserError(f"{path}: expected a configuration file, found a folder") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected UTF-8 text, found other bytes at offset {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: expected TOML: {_lower_first(str(error))}") from None


def _override(values: dict[str, Any], key: str, text: str) -> None:
    """Put `text` at the dotted `key` of `values`."""
    info = _field_at(key.split("."))
    if info is None:
        raise UserError(f"command line: {_unknown(key, text)}")
    *tables, name = key.split(".")
    table = values
    for step in tables:
        inner = table.setdefault(step, {})
        if not isinstance(inner, dict):
            return  # The file has a plain value where a table belongs; checking will say so.
        table = inner
    table[name] = _value_of(text, takes_text=str in (info.annotation, *get_args(info.annotation)))


def _value_of(text: str, takes_text: bool) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    if len(parsed) > 1 or (takes_text and not isinstance(value, str | list)):
        return text  # A text key takes what was typed even where it reads as a number or a date.
    return value


def _one_line(error: ValidationError, path: Path, overridden: set[str]) -> str:
    seen: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        key, message = _explain(detail)
        seen.setdefault(key, message)
    (key, first), *rest = seen.items()
    where = "command line" if key in overridden else str(path)
    if overridden and any(detail["type"] == "value_error" for detail in error.errors(include_url=False)):
        where = f"{path} and command line"  # Values that do not fit one another may come from both.
    more = f" (and {len(rest)} more: {', '.join(name for name, _ in rest)})" if rest else ""
    return f"{where}: {first}{more}"


def _explain(detail: ErrorDetails) -> tuple[str, str]:
    """The key an error of pydantic is about, and the error in our words."""
    location = detail["loc"]
    if detail["type"] == "extra_forbidden":
        key = ".".join(map(str, location))
        return key, _unknown(key, detail["input"])
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        prefix = "".join(f"{part}." for part in location)
        return prefix + message.partition(":")[0], prefix + message
    # Beyond the field lie the arms of a union and the indices of a list: the field's own words cover them.
    depth = max(n for n in range(len(location) + 1) if n == 0 or _field_at(location[:n]) is not None)
    key, info = ".".join(map(str, location[:depth])), _field_at(location[:depth])
    if detail["type"] == "string_pattern_mismatch":
        expected = "letters, digits, '.', '_' and '-', not starting with '.' or '-'"
    elif detail["type"] in ("string_too_short", "too_short"):
        expected = "something that is not empty"
    elif info is None:
        expected = "a table"
    elif depth == 1:
        expected = f"a table ([{key}])"
    else:
        expected = _expected(info)
    return key, f"{key}: expected {expected}, found {_found(detail['input'])}"


def _unknown(key: str, value: object) -> str:
    if "." not in key and isinstance(value, dict):
        near = difflib.get_close_matches(key, Config.model_fields, 1)
        hint = f"did you mean [{near[0]}]?" if near else f"the sections are {', '.join(Config.model_fields)}"
        return f"unknown section [{key}]; {hint}"
    near_key = nearest_key(key)
    if near_key:
        return f"unknown key {key}; did you mean {near_key}?"
    section = _section(key)
    siblings = [_name(k.path) for k in keys() if _section(k.path) == section]
    hint = (
        f"the keys of [{section}] are {', '.join(siblings)}" if siblings else "see shardwright train --help"
    )
    return f"unknown key {key}; {hint}"


def _found(value: object) -> str:
    shown = _toml(value) if isinstance(value, bool | str) else str(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{shown} ({_KINDS.get(type(value), 'a ' + type(value).__name__)})"


_KINDS: dict[type, str] = {
    bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table",
}  # fmt: skip


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
