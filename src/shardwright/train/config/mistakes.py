"""Mistakes in a configuration, in one line: the key, what it takes, what was found, and what to write.

pydantic finds the mistakes, and names them in words of its own. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Set
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shardwright.engine.extend import strategies
from shardwright.train.config.catalog.registry_names import UNKNOWN_KEY, WRONG_NAME, registry_of
from shardwright.train.config.conflicts.table import ConflictError
from shardwright.train.config.keys import (
    ROW,
    expected_of,
    field_at,
    keys,
    name_of,
    nearest_key,
    row_of,
    section_of,
)
from shardwright.train.config.schema import Config, toml_value, value_of
from shardwright.train.errors import did_you_mean


def in_one_line(error: ValidationError, path: Path | str, overridden: Collection[str] = ()) -> str:
    """Return the first mistake, and the keys of the others.

    Args:
        error: of pydantic, for a :class:`Config`.
        path: the file, or another place where the configuration is from.
        overridden: keys whose values are from the command line.
    """
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
        # Values that do not fit one another may come from both.
        error_of_values = details[0]["ctx"]["error"]
        sections: Set[str] = {".".join(map(str, details[0]["loc"]))}
        if isinstance(error_of_values, ConflictError):
            sections, rest = error_of_values.sections, [*rest, *error_of_values.others]
        if any(each.partition(".")[0] in sections for each in overridden):
            where = f"{path} and command line"
    more = f" (and {len(rest)} more: {', '.join(rest)})" if rest else ""
    return f"{where}: {first}{more}"


def _explain(detail: ErrorDetails) -> tuple[str, str]:
    """Return the key an error of pydantic is about, and the error in our words."""
    location = detail["loc"]
    if detail["type"] == "extra_forbidden":
        key = ".".join(map(str, location))
        return key, unknown_key(key, detail["input"])
    if detail["type"] == WRONG_NAME:
        key = ".".join(map(str, (*location[:2], *filter(None, [detail["ctx"].get("key")]))))
        return key, f"{key}: {detail['ctx']['reason']}"
    if detail["type"] == UNKNOWN_KEY:
        key = f"{location[0]}.{detail['ctx']['key']}"
        return key, unknown_key(key, detail["ctx"]["value"])
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        prefix = "".join(f"{part}." for part in location)
        return prefix + message.partition(":")[0], prefix + message
    # Beyond the field lie the arms of a union and the indices of a list: the field's own words cover them.
    depth = max(n for n in range(len(location) + 1) if n == 0 or field_at(location[:n]) is not None)
    key, info = ".".join(map(str, location[:depth])), field_at(location[:depth])
    pattern = detail["type"] == "string_pattern_mismatch" and depth == len(location)
    if pattern:
        expected = "letters, digits, '.', '_' and '-', not starting with '.' or '-'"
    elif _is_empty(detail):
        expected = "a value that is not empty"
    elif info is None or (isinstance(location[depth - 1], int) and row_of(info.annotation)):
        expected = "a table"
    elif depth == 1:
        expected = f"a table ([{key}])"
    else:
        expected = expected_of(info)
    is_missing = detail["type"] == "missing" and depth == len(location)
    found = "none" if is_missing else _value_in_words(detail["input"])
    return key, f"{key}: expected {expected}, found {found}{_remedy(key, info, detail)}"


def _is_empty(detail: ErrorDetails) -> bool:
    """Return whether the error is about an empty string or list."""
    return detail["type"] in ("string_too_short", "too_short") and not detail["input"]


def is_bracketed(text: str) -> bool:
    """Return whether a text is a list whose quotes the shell has removed, such as [a,b]."""
    return text.startswith("[") and text.endswith("]")


def in_quotes(text: str) -> str:
    """Advice for a list whose quotes the shell has removed."""
    items = [item.strip() for item in text[1:-1].split(",")]
    return f"write '{toml_value(items)}': without single quotes the shell removes the double quotes"


def takes_text_or_list(annotation: Any) -> bool:
    """Return whether a key with this type takes a string or a list."""
    return str in get_args(annotation) and any(
        get_origin(get_args(arm)[0]) is tuple for arm in get_args(annotation) if get_origin(arm) is Annotated
    )


def _holds_text(annotation: Any) -> bool:
    return annotation is str or any(_holds_text(inner) for inner in get_args(annotation))


def _remedy(key: str, info: FieldInfo | None, detail: ErrorDetails) -> str:
    """Advice on what to write, where the value shows what its author meant; else empty."""
    value, kind = detail["input"], detail["type"]
    if info is None:
        return ""
    if kind == "missing" and key.endswith(".weight"):
        return "; write weight = 1 in each table for equal shares"
    if kind == "tuple_type" and isinstance(value, str) and is_bracketed(value):
        if row_of(info.annotation):
            return "; put the list into single quotes, or the shell removes the double quotes inside it"
        if _holds_text(info.annotation):
            return f"; {in_quotes(value)}"
        return ""
    if row_of(info.annotation):
        return f"; write a table [[{key.partition('.0')[0]}]]" if isinstance(value, dict | str) else ""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        near = f"[[{key}s]]" if field_at(f"{key}s".split(".")) else f"[{key}]"
        return f"; write {near}"
    if kind == "tuple_type" and isinstance(value, str):
        registry = registry_of(info.annotation, info.metadata)
        if registry is not None and ":" not in value and value not in registry.names():
            names = difflib.get_close_matches(value, registry.names(), 1)
            return f'; write ["{names[0]}"]' if names else f"; there is no {registry.what} {value!r}"
        return f"; write [{toml_value(value)}]" if len(value) < 200 else "; put it into brackets"
    if kind == "tuple_type":
        example = list_example(info)
        if type(value) is int:
            numbers = value_of(example, takes_text=False)
            example = toml_value([value] * len(numbers)) if {int} == set(map(type, numbers)) else example
        return f"; write {example}" if example else ""
    if kind == "literal_error":
        return _meant(key, value, info.annotation)
    plain = kind in ("int_type", "float_type", "bool_type") and str not in get_args(info.annotation)
    if isinstance(value, str) and plain:
        parsed = value_of(value, takes_text=False)
        return "; write it without quotes" if isinstance(parsed, int | float) else ""
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return ""


_MEANT = {("run.device", "gpu"): "cuda", ("train.compile", True): "inductor"}
"""Values that a key does not take, and the value that their author meant."""


_CHATS = ("chat", "chats", "chatml", "sharegpt", "messages", "conversation", "dialog", "dialogue")
_ROWS = ("sft", "instruct", "instruction", "instructions", "alpaca", "prompt", "prompts", "prompt_completion")
_KINDS_OF_ROWS = {
    **dict.fromkeys(_CHATS, "conversations"),
    **dict.fromkeys(_ROWS, "completions"),
    **dict.fromkeys(("text", "texts", "corpus", "pretrain", "pretraining"), "documents"),
}
"""Kinds of data by other names."""


def _other_name(key: str, value: str) -> str:
    """ "; did you mean conversations?" for a value that other projects use; else empty."""
    if re.fullmatch(r"data\.(\w+\.\d+\.)?kind", key):
        meant = _KINDS_OF_ROWS.get(value.lower())
        return f"; did you mean {meant}?" if meant else ""
    if key != "parallel.engine":
        return ""
    if value.lower() in ("deepspeed", "megatron", "accelerate"):
        page = "deepspeed.md" if value.lower() == "deepspeed" else "README.md"
        return f'; leave it out, and use parallel.strategy = "zero3"; see docs/migration/{page}'
    strategy = value if value in strategies.names() else strategies.other_name(value)
    if strategy is None or value.lower().startswith("fsdp"):  # there are engines of nearly this name
        return ""
    return f'; leave it out, and set parallel.strategy = "{strategy}"'


def _meant(key: str, value: object, annotation: Any) -> str:
    """ "; did you mean cuda?", where one of the names that a key takes is meant."""
    if isinstance(value, str) and (other := _other_name(key, value)):
        return other
    if isinstance(value, bool | str) and (meant := _MEANT.get((key, value))):
        return f"; did you mean {meant}?"
    names = [str(each) for arm in (annotation, *get_args(annotation)) for each in get_args(arm)]
    if value is False and "none" in names:
        return "; did you mean none?"
    return did_you_mean(value.lower(), names) if isinstance(value, str) else ""


def list_example(info: FieldInfo) -> str:
    """Return a list that a key takes: the one of its description, else its default, else one value of its type. Empty
    for a key that takes no list."""
    arms = [
        arm
        for arm in (info.annotation, *map(_without_metadata, get_args(info.annotation)))
        if get_origin(arm) is tuple
    ]
    if not arms or row_of(info.annotation):
        return ""
    for text in re.findall(r"(?<=such as )\[[^\]]*\]", info.description or ""):
        return str(text)
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if default and isinstance(default, tuple):
        return toml_value(default)
    registry = registry_of(info.annotation, info.metadata)
    types = [_without_metadata(each) for each in get_args(arms[0]) if each is not ...]
    values = {int: 1, float: 0.5, bool: True, str: registry.names()[0] if registry else "NAME"}
    return toml_value([values.get(each, "VALUE") for each in types])


def _without_metadata(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def unknown_key(key: str, value: object) -> str:
    """Return the message for a key that does not exist."""
    if "." not in key and isinstance(value, dict):
        near = difflib.get_close_matches(key, Config.model_fields, 1)
        hint = f"did you mean [{near[0]}]?" if near else f"the sections are {', '.join(Config.model_fields)}"
        return f"unknown section [{key}]; {hint}"
    near_key = nearest_key(key)
    if near_key:
        return f"unknown key {key}; did you mean {near_key}?"
    section = re.sub(r"\.\d+(\.|$)", rf".{ROW}\1", section_of(key))
    siblings = [name_of(k.path) for k in keys() if section_of(k.path) == section]
    title = f"[[{section.removesuffix(f'.{ROW}')}]]" if section.endswith(f".{ROW}") else f"[{section}]"
    hint = f"the keys of {title} are {', '.join(siblings)}" if siblings else "see shardwright train --help"
    return f"unknown key {key}; {hint}"


def _value_in_words(value: object) -> str:
    text = toml_value(value) if isinstance(value, bool | str) else str(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({_KINDS.get(type(value), 'a ' + type(value).__name__)})"


_KINDS: dict[type, str] = {
    bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table",
}  # fmt: skip
