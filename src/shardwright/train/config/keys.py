"""The keys of a configuration, in words: for help, for messages, and for what other trainers call them.

The keys are declared in `sections`. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from shardwright.train.config.catalog.kinds import kinds
from shardwright.train.config.catalog.registry_names import OneOf
from shardwright.train.config.schema import Config, toml_value
from shardwright.train.config.sections.base import Section
from shardwright.train.config.sections.model import ModelConfig


@dataclass(frozen=True)
class ConfigKey:
    """One key of the file: `path` is section.key, `expected` says in words which values it takes.

    The path of a key in a list of tables has the letter N for the number of the table: data.sources.N.weight.
    """

    path: str
    expected: str
    default: str
    description: str

    @property
    def title(self) -> str:
        """For the help: the option of the command line, or the table and the key of a list of tables."""
        table, is_row, name = self.path.partition(f".{ROW}.")
        return f"[[{table}]] {name}" if is_row else f"--{self.path}"


def keys() -> Iterator[ConfigKey]:
    """Every key of the file in order, keys of nested tables included."""
    for name, info in Config.model_fields.items():
        yield from _keys_of(table_of(info.annotation), name)
        if name == "model":
            yield from _keys_of_added_kinds()


def _keys_of_added_kinds() -> Iterator[ConfigKey]:
    """Yield the keys of `[model]` that only kinds have which are not built in."""
    seen = set(ModelConfig.model_fields)
    for name in kinds.names():
        try:
            kind = kinds.get(name)
        except ValueError:
            continue  # of a package that cannot be imported, which must not hide the help of all others
        for each in fields(kind.shape):
            if each.name not in seen:
                seen.add(each.name)
                expected = _in_words(kind.type_of(each.name))
                yield ConfigKey(f"model.{each.name}", expected, "the preset's", f"Of {kind.name} only.")


def section_summary(name: str) -> str:
    """Return the first paragraph about the section of that name, in one line."""
    table = table_of(Config.model_fields[name].annotation)
    return " ".join((table.__doc__ or "").partition("\n\n")[0].split()) if table else ""


def _keys_of(table: type[Section] | None, prefix: str) -> Iterator[ConfigKey]:
    for name, info in table.model_fields.items() if table else ():
        path, inner = f"{prefix}.{name}", table_of(info.annotation)
        row = row_of(info.annotation)
        if row is not None:
            yield ConfigKey(path, expected_of(info), "none", info.description or "")
            yield from _keys_of(row, f"{path}.{ROW}")
        elif inner is not None:
            for key in _keys_of(inner, path):
                yield replace(key, default=f"from the preset ({key.default} if the table is present)")
        else:
            value = None if info.is_required() else info.get_default(call_default_factory=True)
            default = _of_none(path) if value is None else toml_value(value)
            yield ConfigKey(
                path,
                expected_of(info),
                "none, required" if info.is_required() else default,
                info.description or "",
            )


def _of_none(path: str) -> str:
    """Return the default, in words, of a key without one: a preset has the numbers of a model alone."""
    section, _, name = path.partition(".")
    in_presets = section == "model" and any(kind.presets and name in kind.numbers for kind in kinds.known())
    return "the preset's" if in_presets else "none"


def table_of(annotation: Any) -> type[Section] | None:
    """Return the model behind an annotation that stands for a table, `None` for a plain value."""
    if get_origin(annotation) is tuple:
        return None
    for choice in get_args(annotation) or (annotation,):
        if isinstance(choice, type) and issubclass(choice, Section):
            return choice
    return None


def row_of(annotation: Any) -> type[Section] | None:
    """Return the model of each table in a list of tables, `None` for any other value."""
    return table_of(get_args(annotation)[0]) if get_origin(annotation) is tuple else None


def field_at(path: Sequence[str | int]) -> FieldInfo | None:
    """Return the field that a path of names leads to, or `None` where there is no such key."""
    table: type[Section] | None = Config
    info = None
    for name in path:
        if isinstance(name, int) and info is not None and (row := row_of(info.annotation)) is not None:
            table = row
            continue
        info = table.model_fields.get(str(name)) if table else None
        if info is None:
            return None
        table = table_of(info.annotation)
    return info


def expected_of(info: FieldInfo) -> str:
    return _in_words(info.annotation, info.metadata)


def _in_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    registry = next((m.registry for m in (*metadata, *args[1:]) if isinstance(m, OneOf)), None)
    if registry is not None:
        return str(registry.expected())
    if origin is Annotated:
        own_words = next(
            (m.description for m in args[1:] if isinstance(m, FieldInfo) and m.description), None
        )
        if own_words is not None:
            return str(own_words)
        inner = [m for part in args[1:] for m in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return _in_words(args[0], [*inner, *metadata])
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(arg, metadata) for arg in args if arg is not type(None))
    if origin is tuple and args[-1] is ...:
        each = _in_words(args[0])
        if each == "a table":
            return "a list of tables"
        return "a list of strings" if each == _WORDS[str] else f"a list of values, each {each}"
    if origin is tuple:
        return f"a list of {len(args)} numbers{_range_in_words(args[0].__metadata__[0].metadata)}"
    if origin is dict or table_of(annotation) is not None:
        return "a table"
    words = _WORDS.get(annotation)
    if words is None:
        return str(getattr(annotation, "__name__", annotation))
    return words + _range_in_words(metadata)


#: Stands for the number of a table in the path of a key.
ROW = "N"
_WORDS: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _range_in_words(metadata: Sequence[Any]) -> str:
    bounds = []
    for item in metadata:
        for kind, sign, name in ((Ge, ">=", "ge"), (Gt, ">", "gt"), (Le, "<=", "le"), (Lt, "<", "lt")):
            if isinstance(item, kind):
                bounds.append(f"{sign} {getattr(item, name)}")
    return " " + " and ".join(bounds) if bounds else ""


#: By the names that other trainers use, the keys here.
OTHER_NAMES = {
    "batch_size": "train.micro_batch",
    "bf16": "parallel.param_dtype",
    "checkpointing_steps": "checkpoint.every",
    "dataset": "data.source",
    "eval_steps": "validation.every",
    "gradient_accumulation_steps": "train.global_batch",
    "gradient_checkpointing": "activations.checkpoint",
    "gradient_clipping": "train.max_norm",
    "hidden_size": "model.dim",
    "learning_rate": "optimizer.lr",
    "logging_steps": "log.every",
    "lora_alpha": "finetune.alpha",
    "lora_r": "finetune.rank",
    "lr_scheduler_type": "optimizer.schedule",
    "max_grad_norm": "train.max_norm",
    "max_length": "train.seq_len",
    "max_seq_length": "train.seq_len",
    "max_steps": "train.steps",
    "model_name_or_path": "model.path",
    "num_hidden_layers": "model.n_layers",
    "num_train_epochs": "train.epochs",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "train.micro_batch",
    "r": "finetune.rank",
    "report_to": "log.sinks",
    "save_steps": "checkpoint.every",
    "sequence_length": "train.seq_len",
    "target_modules": "finetune.targets",
    "torch_dtype": "parallel.param_dtype",
}


def nearest_key(path: str) -> str | None:
    """Return the valid key most like `path`: one of the same section, else one of the same name elsewhere.

    A table of a list keeps its number: data.sources.0.weight.
    """
    section, name = section_of(path), name_of(path)
    number = next((part for part in section.split(".") if part.isdecimal()), None)
    if number is not None:
        near_key = nearest_key(".".join([ROW if part == number else part for part in path.split(".")]))
        return near_key and near_key.replace(f".{ROW}.", f".{number}.")
    all_keys = [key.path for key in keys() if ROW not in key.path.split(".") or ROW in section.split(".")]
    other = OTHER_NAMES.get(name)
    if other is not None and path not in all_keys:
        return other
    if section in map(section_of, all_keys):
        near = difflib.get_close_matches(name, [name_of(k) for k in all_keys if section_of(k) == section], 1)
        if near:
            return f"{section}.{near[0]}"
    elsewhere = difflib.get_close_matches(name, [name_of(k) for k in all_keys], 1, cutoff=0.75)
    if elsewhere:
        same_name = [k for k in all_keys if name_of(k) == elsewhere[0]]
        return difflib.get_close_matches(path, same_name, 1, cutoff=0.0)[0]
    if section in map(section_of, all_keys):
        return None
    near = difflib.get_close_matches(path, all_keys, 1, cutoff=0.7)
    return near[0] if near else None


def section_of(path: str) -> str:
    return path.rpartition(".")[0]


def name_of(path: str) -> str:
    return path.rpartition(".")[2]
