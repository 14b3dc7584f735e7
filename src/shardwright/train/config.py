"""Configurations: read from TOML, overridden from the command line, refused in words a user can act on.

The keys themselves are declared in `sections`. Nothing here imports torch, so that `--help` and a mistyped key
are answered at once.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shardwright.extend import Registry
from shardwright.train.errors import UserError
from shardwright.train.finetune.settings import FinetuneConfig
from shardwright.train.models.kinds import kinds
from shardwright.train.one_of import UNKNOWN_KEY, WRONG_NAME, OneOf
from shardwright.train.schema import Config, toml_value
from shardwright.train.sections.activations import ActivationConfig
from shardwright.train.sections.base import Section
from shardwright.train.sections.checkpoint import CheckpointConfig
from shardwright.train.sections.data import DataConfig
from shardwright.train.sections.fault import FaultConfig
from shardwright.train.sections.log import LogConfig
from shardwright.train.sections.model import ModelConfig, RopeScalingConfig
from shardwright.train.sections.optimizer import OptimizerConfig
from shardwright.train.sections.parallel import ParallelConfig
from shardwright.train.sections.run import RunConfig
from shardwright.train.sections.train import TrainConfig
from shardwright.train.sections.validation import ValidationConfig

__all__ = [
    "ActivationConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "FaultConfig",
    "FinetuneConfig",
    "Key",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RopeScalingConfig",
    "RunConfig",
    "TrainConfig",
    "ValidationConfig",
    "keys",
    "load_config",
    "nearest_key",
    "section_summary",
    "stored_config",
]

# ------------------------------------------------------------------------------
# Keys: what may be set, for --help and for error messages


@dataclass(frozen=True)
class Key:
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
        table, is_row, name = self.path.partition(f".{_ROW}.")
        return f"[[{table}]] {name}" if is_row else f"--{self.path}"


def keys() -> Iterator[Key]:
    """Every key of the file in order, keys of nested tables included."""
    for name, info in Config.model_fields.items():
        yield from _keys_of(_table_of(info.annotation), name)
        if name == "model":
            yield from _keys_of_added_kinds()


def _keys_of_added_kinds() -> Iterator[Key]:
    """Keys of `[model]` that only kinds have which are not built in."""
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
                yield Key(f"model.{each.name}", expected, "the preset's", f"Of {kind.name} only.")


def section_summary(name: str) -> str:
    """What the section of that name is about, in a line."""
    table = _table_of(Config.model_fields[name].annotation)
    return (table.__doc__ or "").splitlines()[0] if table else ""


def _keys_of(table: type[Section] | None, prefix: str) -> Iterator[Key]:
    for name, info in table.model_fields.items() if table else ():
        path, inner = f"{prefix}.{name}", _table_of(info.annotation)
        row = _row_of(info.annotation)
        if row is not None:
            yield Key(path, _expected(info), "none", info.description or "")
            yield from _keys_of(row, f"{path}.{_ROW}")
        elif inner is not None:
            for key in _keys_of(inner, path):
                yield replace(key, default=f"from the preset ({key.default} if the table is present)")
        else:
            value = None if info.is_required() else info.get_default(call_default_factory=True)
            default = "the preset's" if value is None else toml_value(value)
            yield Key(
                path,
                _expected(info),
                "none, required" if info.is_required() else default,
                info.description or "",
            )


def _table_of(annotation: Any) -> type[Section] | None:
    """The model behind an annotation that stands for a table, `None` for a plain value."""
    if get_origin(annotation) is tuple:
        return None
    for choice in get_args(annotation) or (annotation,):
        if isinstance(choice, type) and issubclass(choice, Section):
            return choice
    return None


def _row_of(annotation: Any) -> type[Section] | None:
    """The model of each table in a list of tables, `None` for any other value."""
    return _table_of(get_args(annotation)[0]) if get_origin(annotation) is tuple else None


def _field_at(path: Sequence[str | int]) -> FieldInfo | None:
    """The field that a path of names leads to, or `None` where there is no such key."""
    table: type[Section] | None = Config
    info = None
    for name in path:
        if isinstance(name, int) and info is not None and (row := _row_of(info.annotation)) is not None:
            table = row
            continue
        info = table.model_fields.get(str(name)) if table else None
        if info is None:
            return None
        table = _table_of(info.annotation)
    return info


def _expected(info: FieldInfo) -> str:
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
    if origin is dict or _table_of(annotation) is not None:
        return "a table"
    words = _WORDS.get(annotation)
    if words is None:
        return str(getattr(annotation, "__name__", annotation))
    return words + _range_in_words(metadata)


#: Stands for the number of a table in the path of a key.
_ROW = "N"
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
    "epochs": "train.steps",
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
    "num_train_epochs": "train.steps",
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
    """The valid key most like `path`: one of the same section, else one of the same name elsewhere.

    A table of a list keeps its number: data.sources.0.weight.
    """
    section, name = _section(path), _name(path)
    number = next((part for part in section.split(".") if part.isdecimal()), None)
    if number is not None:
        near_key = nearest_key(".".join([_ROW if part == number else part for part in path.split(".")]))
        return near_key and near_key.replace(f".{_ROW}.", f".{number}.")
    all_keys = [key.path for key in keys() if _ROW not in key.path.split(".") or _ROW in section.split(".")]
    other = OTHER_NAMES.get(name)
    if other is not None and path not in all_keys:
        return other
    if section in map(_section, all_keys):
        near = difflib.get_close_matches(name, [_name(k) for k in all_keys if _section(k) == section], 1)
        if near:
            return f"{section}.{near[0]}"
    elsewhere = difflib.get_close_matches(name, [_name(k) for k in all_keys], 1, cutoff=0.75)
    if elsewhere:
        same_name = [k for k in all_keys if _name(k) == elsewhere[0]]
        return difflib.get_close_matches(path, same_name, 1, cutoff=0.0)[0]
    if section in map(_section, all_keys):
        return None
    near = difflib.get_close_matches(path, all_keys, 1, cutoff=0.7)
    return near[0] if near else None


def _section(path: str) -> str:
    return path.rpartition(".")[0]


def _name(path: str) -> str:
    return path.rpartition(".")[2]


# ------------------------------------------------------------------------------
# Reading


def load_config(
    path: Path, overrides: Sequence[tuple[str, str]] = (), *, ranks: int = 1, resumes: bool = False
) -> Config:
    """The configuration in the TOML file at `path`, with `(section.key, text)` overrides on top.

    It must fit a job of so many `ranks`, which continues a run if it `resumes`; a message advises values for that. The
    text of an override is read as a TOML value; bare words are strings. Raises UserError, one line, for a
    file that cannot be read, an unknown key, a wrong type, a value out of range or values that do not fit.
    """
    values = _read_toml(path)
    for key, text in sorted(
        overrides, key=lambda pair: pair[0] != "model.kind"
    ):  # it says which keys there are
        _override(values, key, text)
    try:
        return Config.model_validate(values, context={"ranks": ranks, "resumes": resumes})
    except ValidationError as error:
        raise UserError(_one_line(error, path, {key for key, _ in overrides})) from None


def stored_config(
    run: Path, overrides: Sequence[tuple[str, str]] = (), *, ranks: int = 1, resumes: bool = False
) -> Config:
    """The configuration that a run was last started with. Arguments and errors as for :func:`load_config`.

    A run keeps the names and import paths of registered values and not their files, so these may be missing here: the
    error names all of them.
    """
    path = run / "config.toml"
    values = _read_toml(path)
    for key, text in overrides:
        if _field_at(key.split(".")) is not None:
            _override(values, key, text)
    missing = {
        key: (name, error)
        for key, name, registry in _registered(values)
        if (error := _problem(registry, name))
    }
    if not missing:
        return load_config(path, overrides, ranks=ranks, resumes=resumes)
    modules = dict.fromkeys(
        name.partition(":")[0].partition(".")[0] for name, _ in missing.values() if ":" in name
    )
    names = ", ".join(f"{key} = {name!r}" for key, (name, _) in missing.items())
    ways = []
    if modules:
        ways.append(
            f"Start in the folder that has {' and '.join(modules)}, or name that folder in PYTHONPATH"
        )
    if any(":" not in name for name, _ in missing.values()):
        ways.append("Install the packages that register the names without a colon")
    reason = next(iter(missing.values()))[1].partition(". Start in")[0]
    raise UserError(
        f"The run {run} uses values that cannot be found here: {names}. The run's folder stores their names, but not "
        f"the files that define them. {'. '.join(ways)}. The first problem: {reason}"
    )


def _registered(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Registry[Any]]]:
    """Keys whose values are names of a registry, with name and registry. A list has several."""
    for section, info in Config.model_fields.items():
        table, section_values = _table_of(info.annotation), values.get(section)
        if table is None or not isinstance(section_values, dict):
            continue
        for key, field in table.model_fields.items():
            registry = _registry_of(field.annotation, field.metadata)
            names = section_values.get(key)
            for name in names if isinstance(names, list) else [names]:
                if registry is not None and isinstance(name, str):
                    yield f"{section}.{key}", name, registry


def _registry_of(annotation: Any, metadata: Sequence[Any] = ()) -> Registry[Any] | None:
    """The registry whose names an annotation takes, also in a list or beside other types."""
    for each in (*metadata, *getattr(annotation, "__metadata__", ())):
        if isinstance(each, OneOf):
            return each.registry
    return next((inner for arg in get_args(annotation) if (inner := _registry_of(arg)) is not None), None)


def _problem(registry: Registry[Any], name: str) -> str | None:
    """Why a name cannot be found."""
    try:
        registry.get(name)
    except ValueError as error:
        return str(error)
    return None


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
    except ValueError:  # Python reads no integers of more than 4,300 digits
        raise UserError(
            f"{path}: expected integers of usual size, found one of thousands of digits"
        ) from None
    except RecursionError:
        raise UserError(f"{path}: found lists or tables that are too deep inside one another") from None


def _override(values: dict[str, Any], key: str, text: str) -> None:
    """Put `text` at the dotted `key` of `values`."""
    info = _field_at(key.split("."))
    whole = re.match(r"(.+?)\.\d+(\.|$)", key)
    if whole and (field := _field_at(whole[1].split("."))) is not None and _row_of(field.annotation):
        raise UserError(
            f"command line: {key}: one table of a list cannot be set here; change it in the file, or set all tables: "
            f"--{whole[1]} '[{{ path = \"...\", weight = 1 }}]'"
        )
    own = _own_type(values, key) if info is None else None
    if info is None and own is None:
        raise UserError(f"command line: {_unknown(key, text)}")
    *tables, name = key.split(".")
    table = values
    for step in tables:
        inner = table.setdefault(step, {})
        if not isinstance(inner, dict):
            return  # The file has a plain value where a table belongs; checking will say so.
        table = inner
    annotation = own if info is None else info.annotation
    takes_text = str in (annotation, *get_args(annotation))
    value = table[name] = _value_of(text, takes_text)
    if _takes_text_or_list(annotation) and isinstance(value, str) and _is_bracketed(value):
        raise UserError(
            f"command line: {key}: expected a string or a list of strings, found {value}; {_quoted(value)}"
        )


def _own_type(values: dict[str, Any], key: str) -> Any:
    """The type of a key that only the configured kind of model has, of an optimizer's option or of an argument of the
    user's function; None for others."""
    section, _, name = key.partition(".")
    if (section, name.partition(".")[0]) in (("optimizer", "options"), ("model", "arguments")):
        return object
    model = values.get("model", {})
    if section != "model" or not isinstance(model, dict):
        return None
    try:
        kind = kinds.get(str(model.get("kind", "llama")))
    except ValueError:
        return None
    return kind.type_of(name) if name in kind.numbers else None


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
    # A mistyped key is often the reason why another one is missing. Of the arms of a union, the one that is only empty
    # is the one that was meant.
    details = sorted(
        error.errors(include_url=False),
        key=lambda detail: (detail["type"] == "missing", not _is_empty(detail)),
    )
    for detail in details:
        key, message = _explain(detail)
        seen.setdefault(key, message)
    (key, first), *others = seen.items()
    rest = [name for name, _ in others if not first.endswith(f"did you mean {name}?")]
    where = "command line" if any(f"{key}.".startswith(f"{each}.") for each in overridden) else str(path)
    if details[0]["type"] == "value_error":
        # Values that do not fit one another may come from both. Of [run] none has to fit another section.
        section = ".".join(map(str, details[0]["loc"]))
        sections = {section} if section else set(Config.model_fields) - {"run"}
        if any(each.partition(".")[0] in sections for each in overridden):
            where = f"{path} and command line"
    more = f" (and {len(rest)} more: {', '.join(rest)})" if rest else ""
    return f"{where}: {first}{more}"


def _explain(detail: ErrorDetails) -> tuple[str, str]:
    """The key an error of pydantic is about, and the error in our words."""
    location = detail["loc"]
    if detail["type"] == "extra_forbidden":
        key = ".".join(map(str, location))
        return key, _unknown(key, detail["input"])
    if detail["type"] == WRONG_NAME:
        key = ".".join(map(str, (*location[:2], *filter(None, [detail["ctx"].get("key")]))))
        return key, f"{key}: {detail['ctx']['reason']}"
    if detail["type"] == UNKNOWN_KEY:
        key = f"{location[0]}.{detail['ctx']['key']}"
        return key, _unknown(key, detail["ctx"]["value"])
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        prefix = "".join(f"{part}." for part in location)
        return prefix + message.partition(":")[0], prefix + message
    # Beyond the field lie the arms of a union and the indices of a list: the field's own words cover them.
    depth = max(n for n in range(len(location) + 1) if n == 0 or _field_at(location[:n]) is not None)
    key, info = ".".join(map(str, location[:depth])), _field_at(location[:depth])
    pattern = detail["type"] == "string_pattern_mismatch" and depth == len(location)
    if pattern:
        expected = "letters, digits, '.', '_' and '-', not starting with '.' or '-'"
    elif _is_empty(detail):
        expected = "a value that is not empty"
    elif info is None or (isinstance(location[depth - 1], int) and _row_of(info.annotation)):
        expected = "a table"
    elif depth == 1:
        expected = f"a table ([{key}])"
    else:
        expected = _expected(info)
    is_missing = detail["type"] == "missing" and depth == len(location)
    found = "none" if is_missing else _value_in_words(detail["input"])
    return key, f"{key}: expected {expected}, found {found}{_remedy(key, info, detail)}"


def _is_empty(detail: ErrorDetails) -> bool:
    """Whether the error is about an empty string or list."""
    return detail["type"] in ("string_too_short", "too_short") and not detail["input"]


def _is_bracketed(text: str) -> bool:
    """Whether a text is a list whose quotes the shell has removed, such as [a,b]."""
    return text.startswith("[") and text.endswith("]")


def _quoted(text: str) -> str:
    """What to write for such a list."""
    items = [item.strip() for item in text[1:-1].split(",")]
    return f"write '{toml_value(items)}': without single quotes the shell removes the double quotes"


def _takes_text_or_list(annotation: Any) -> bool:
    return str in get_args(annotation) and any(
        get_origin(get_args(arm)[0]) is tuple for arm in get_args(annotation) if get_origin(arm) is Annotated
    )


def _holds_text(annotation: Any) -> bool:
    return annotation is str or any(_holds_text(inner) for inner in get_args(annotation))


def _remedy(key: str, info: FieldInfo | None, detail: ErrorDetails) -> str:
    """What to write, where the value says what its author meant."""
    value, kind = detail["input"], detail["type"]
    if info is None:
        return ""
    if kind == "tuple_type" and isinstance(value, str) and _is_bracketed(value):
        if _row_of(info.annotation):
            return "; put the list into single quotes, or the shell removes the double quotes inside it"
        if _holds_text(info.annotation):
            return f"; {_quoted(value)}"
        return ""
    if _row_of(info.annotation):
        return f"; write a table [[{key.partition('.0')[0]}]]" if isinstance(value, dict | str) else ""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        near = f"[[{key}s]]" if _field_at(f"{key}s".split(".")) else f"[{key}]"
        return f"; write {near}"
    if kind == "tuple_type" and isinstance(value, str):
        return f"; write [{toml_value(value)}]" if len(value) < 200 else "; put it into brackets"
    plain = kind in ("int_type", "float_type", "bool_type") and str not in get_args(info.annotation)
    if isinstance(value, str) and plain:
        parsed = _value_of(value, takes_text=False)
        return "; write it without quotes" if isinstance(parsed, int | float) else ""
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return ""


def _unknown(key: str, value: object) -> str:
    if "." not in key and isinstance(value, dict):
        near = difflib.get_close_matches(key, Config.model_fields, 1)
        hint = f"did you mean [{near[0]}]?" if near else f"the sections are {', '.join(Config.model_fields)}"
        return f"unknown section [{key}]; {hint}"
    near_key = nearest_key(key)
    if near_key:
        return f"unknown key {key}; did you mean {near_key}?"
    section = re.sub(r"\.\d+(\.|$)", rf".{_ROW}\1", _section(key))
    siblings = [_name(k.path) for k in keys() if _section(k.path) == section]
    title = f"[[{section.removesuffix(f'.{_ROW}')}]]" if section.endswith(f".{_ROW}") else f"[{section}]"
    hint = f"the keys of {title} are {', '.join(siblings)}" if siblings else "see shardwright train --help"
    return f"unknown key {key}; {hint}"


def _value_in_words(value: object) -> str:
    text = toml_value(value) if isinstance(value, bool | str) else str(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({_KINDS.get(type(value), 'a ' + type(value).__name__)})"


_KINDS: dict[type, str] = {
    bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table",
}  # fmt: skip


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
