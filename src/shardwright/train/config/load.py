"""Configurations: read from TOML, overridden from the command line, refused in words a user can act on.

The keys themselves are declared in `sections`. Nothing here imports torch, so that `--help` and a mistyped key
are answered at once.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from shardwright.engine.extend import Registry
from shardwright.train.config.catalog.kinds import kinds
from shardwright.train.config.catalog.registry_names import registry_of
from shardwright.train.config.keys import field_at, row_of, table_of
from shardwright.train.config.mistakes import (
    in_one_line,
    in_quotes,
    is_bracketed,
    takes_text_or_list,
    unknown_key,
)
from shardwright.train.config.schema import Config, value_of
from shardwright.train.errors import UserError, did_you_mean, listed


def load_config(
    path: Path, overrides: Sequence[tuple[str, str]] = (), *, ranks: int = 1, resumes: bool = False
) -> Config:
    """Return the configuration in the TOML file at `path`, with `(section.key, text)` overrides on top.

    It must fit a job of this number of `ranks`, which continues a run if it `resumes`; a message advises values for
    that. The text of an override is read as a TOML value; bare words are strings. Raises UserError, one line, for a
    file that cannot be read, an unknown key, a wrong type, a value out of range or values that do not fit.
    """
    return checked_config(_read_toml(path), path, overrides, ranks=ranks, resumes=resumes)


def checked_config(
    values: dict[str, Any],
    path: Path | str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    ranks: int = 1,
    resumes: bool = False,
) -> Config:
    """Return the configuration of tables of `values`, which change. `path`: the place where they are from. Other
    arguments and errors as for :func:`load_config`."""
    for key, text in sorted(
        overrides, key=lambda pair: pair[0] != "model.kind"
    ):  # it says which keys there are
        _override(values, key, text)
    _drop_other_length(values, {key for key, _ in overrides})
    try:
        return Config.model_validate(values, context={"ranks": ranks, "resumes": resumes})
    except ValidationError as error:
        raise UserError(in_one_line(error, path, {key for key, _ in overrides})) from None


def stored_config(
    run: Path, overrides: Sequence[tuple[str, str]] = (), *, ranks: int = 1, resumes: bool = False
) -> Config:
    """Return the configuration that a run was last started with. Arguments and errors as for :func:`load_config`.

    A run keeps the names and import paths of registered values and not their files, so these may be missing here: the
    error names all of them.
    """
    path = run / "config.toml"
    values = _read_toml(path)
    special_tokens = _special_tokens_of(values)
    for key, text in overrides:
        if field_at(key.split(".")) is not None:
            _override(values, key, text)
    missing = {
        key: (name, error)
        for key, name, registry in _registered(values)
        if (error := _problem(registry, name))
    }
    if not missing:
        config = load_config(path, overrides, ranks=ranks, resumes=resumes)
        return with_special_tokens(config, special_tokens)
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


def _special_tokens_of(values: Mapping[str, Any]) -> str:
    """`data.special_tokens` of a stored configuration. Before this key a text became the tokens that it spells."""
    data = values.get("data")
    return str(data.get("special_tokens", "tokens")) if isinstance(data, dict) else "tokens"


def with_special_tokens(config: Config, value: str | None) -> Config:
    """Return the configuration with this `data.special_tokens`, unless it has one."""
    if config.data.special_tokens is not None:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"special_tokens": value})})


def _registered(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Registry[Any]]]:
    """Yield the keys whose values are names of a registry, with name and registry. A list has several."""
    for section, info in Config.model_fields.items():
        table, section_values = table_of(info.annotation), values.get(section)
        if table is None or not isinstance(section_values, dict):
            continue
        for key, field in table.model_fields.items():
            registry = registry_of(field.annotation, field.metadata)
            names = section_values.get(key)
            for name in names if isinstance(names, list) else [names]:
                if registry is not None and isinstance(name, str):
                    yield f"{section}.{key}", name, registry


def _problem(registry: Registry[Any], name: str) -> str | None:
    """Return the reason why a name cannot be found."""
    try:
        registry.get(name)
    except ValueError as error:
        return str(error)
    return None


def _read_toml(path: Path) -> dict[str, Any]:
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"{path}: expected a configuration file, found nothing there{_near(path)}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: expected a configuration file, found a folder") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected UTF-8 text, found other bytes at offset {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: expected {_toml_mistake(error, text)}") from None
    except ValueError:  # Python reads no integers of more than 4,300 digits
        raise UserError(
            f"{path}: expected integers of usual size, found one of thousands of digits"
        ) from None
    except RecursionError:
        raise UserError(f"{path}: found lists or tables that are too deep inside one another") from None


def _toml_mistake(error: tomllib.TOMLDecodeError, text: str) -> str:
    """Return the error of TOML in words, with the key if the file has it twice."""
    place = re.fullmatch(
        r"Cannot overwrite a value \(at (?:line (\d+), column \d+|end of document)\)", str(error)
    )
    if place is not None:
        before = text.splitlines()[: int(place[1]) if place[1] else None]
        for number, line in reversed(list(enumerate(before, 1))):  # a value may end some lines after its key
            if key := re.match(r"\s*([\w.'\"-]+)\s*=", line):
                return f"each key once, found {key[1]} again in line {number}; remove one of the two"
    return f"TOML: {_lower_first(str(error))}"


def _near(path: Path) -> str:
    """ " (/here/jop.toml); did you mean a.toml or job.toml?": the whole path, and files of TOML with nearly that name
    in the same folder, else some of them."""
    place = f" ({os.path.abspath(path)})"
    try:
        files = {each.name: str(each) for each in sorted(path.parent.iterdir()) if each.suffix == ".toml"}
        files.pop("pyproject.toml", None)
    except OSError:
        return f"{place}; there is no folder {os.path.abspath(path.parent)}"
    near = did_you_mean(path.name, files, 2, 0.75)
    return place + (near or (f"; that folder has {listed(files.values())}" if files else ""))


def _override(values: dict[str, Any], key: str, text: str) -> None:
    """Put `text` at the dotted `key` of `values`."""
    info = field_at(key.split("."))
    whole = re.match(r"(.+?)\.\d+(\.|$)", key)
    if whole and (field := field_at(whole[1].split("."))) is not None and row_of(field.annotation):
        raise UserError(
            f"command line: {key}: one table of a list cannot be set here; change it in the file, or set all tables: "
            f"--{whole[1]} '[{{ path = \"...\", weight = 1 }}]'"
        )
    own = _own_type(values, key) if info is None else None
    if info is None and own is None:
        raise UserError(f"command line: {unknown_key(key, text)}")
    *tables, name = key.split(".")
    table = values
    for step in tables:
        inner = table.setdefault(step, {})
        if not isinstance(inner, dict):
            return  # The file has a plain value where a table belongs; checking will say so.
        table = inner
    annotation = own if info is None else info.annotation
    takes_text = str in (annotation, *get_args(annotation))
    value = table[name] = value_of(text, takes_text)
    if takes_text_or_list(annotation) and isinstance(value, str) and is_bracketed(value):
        raise UserError(
            f"command line: {key}: expected a string or a list of strings, found {value}; {in_quotes(value)}"
        )


def _drop_other_length(values: dict[str, Any], overridden: set[str]) -> None:
    """Let `train.steps` of the command line replace `train.epochs` of the file, and the reverse."""
    lengths = overridden & {"train.steps", "train.epochs"}
    if len(lengths) == 1 and isinstance(train := values.get("train"), dict):
        key, other = ("steps", "epochs") if "train.steps" in lengths else ("epochs", "steps")
        if train.get(key):
            train.pop(other, None)


#: Keys whose values are tables with keys of the user.
_TABLES = (("optimizer", "options"), ("model", "arguments"), ("train", "loss_arguments"))


def _own_type(values: dict[str, Any], key: str) -> Any:
    """Return the type of a key that only the configured kind of model has, of an optimizer's option or of an argument
    of the user's function; None for others."""
    section, _, name = key.partition(".")
    if (section, name.partition(".")[0]) in _TABLES:
        return object
    model = values.get("model", {})
    if section != "model" or not isinstance(model, dict):
        return None
    try:
        kind = kinds.get(str(model.get("kind", "llama")))
    except ValueError:
        return None
    return kind.type_of(name) if name in kind.numbers else None


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
