"""Documents, conversations and completions as plain values, and how a row of a file becomes one.

Nothing here opens a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from shardwright.train.data.sources.places import DataFile, line_number
from shardwright.train.errors import UserError

Kind: TypeAlias = Literal["documents", "conversations", "completions"]

SPAN = 1 << 20  #: bytes of a file that one process reads at once, about
PIECE = 1 << 17  #: characters of a document that are encoded at once, about
CONTEXT = 256  #: characters beside a piece that its tokens may depend on


@dataclass(frozen=True)
class DataFiles:
    """Files, and what to take from their rows."""

    paths: tuple[str, ...]
    kind: Kind = "documents"
    text_key: str = "text"
    messages_key: str = "messages"
    prompt_key: str = "prompt"
    completion_key: str = "completion"
    key: str = "data.source"  #: the key of the configuration, for messages

    @property
    def section(self) -> str:
        """The table of the configuration that has the source's keys."""
        return self.key.rpartition(".")[0]


@dataclass(frozen=True)
class FilePart:
    """A part of a file that one process reads: bytes, row groups, record batches or elements from start to stop."""

    place: DataFile
    start: int
    stop: int
    nbytes: int  #: about; for the progress bar


class Origin(NamedTuple):
    """The beginning of an item. ``unit`` is ``line`` (then ``number`` is its offset in bytes) or ``row`` (from 0)."""

    place: DataFile
    unit: Literal["line", "row", "file"]
    number: int

    def __str__(self) -> str:
        if self.unit == "line":
            return f"line {line_number(self.place, self.number)} of {self.place}"
        return f"row {self.number} of {self.place}" if self.unit == "row" else str(self.place)


@dataclass(frozen=True)
class Document:
    """A text, or a part of one. Parts follow each other; ``before`` and ``after`` are the text around a part."""

    text: str
    before: str = ""
    after: str = ""
    first: bool = True  #: the document begins with this part
    last: bool = True  #: the document ends with this part


@dataclass(frozen=True)
class Conversation:
    """Messages of a chat, each a mapping with ``role`` and ``content``, and the tools that it may use."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    origin: Origin | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Completion:
    """A prompt, which is not learnt, and the text to learn after it."""

    prompt: str
    completion: str
    origin: Origin | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class Ids:
    """Tokens that a file holds already: one dimension, any integer dtype."""

    ids: np.ndarray
    origin: Origin
    first: bool
    last: bool


Item: TypeAlias = Document | Conversation | Completion | Ids

TOOLS = "tools"  #: the key of the tools beside the messages
ASSISTANT = "assistant"  #: the role whose text is trained
_KEYS = {
    "documents": ("text_key",),
    "conversations": ("messages_key",),
    "completions": ("prompt_key", "completion_key"),
}


def needed_keys(source: DataFiles) -> dict[str, str]:
    """Return the keys that every row must have, by the setting that names each."""
    return {setting: getattr(source, setting) for setting in _KEYS[source.kind]}


def items_of(row: Mapping[str, Any], source: DataFiles, origin: Origin) -> Iterator[Item]:
    """Yield the item of a row, a long document in parts. Raises UserError if the row does not hold what it should."""
    check_keys(row, source, origin)
    if source.kind == "documents":
        yield from parts(_text(row, "text_key", source, origin))
    elif source.kind == "completions":
        prompt = _text(row, "prompt_key", source, origin)
        yield Completion(prompt, _text(row, "completion_key", source, origin), origin)
    else:
        yield _conversation(row, source, origin)


def check_keys(names: Mapping[str, Any], source: DataFiles, where: object) -> None:
    """Raise UserError if a key is missing, with the keys that are there."""
    for setting, key in needed_keys(source).items():
        if key not in names:
            there = ", ".join(repr(name) for name in list(names)[:20])
            full, what = f"{source.section}.{setting}", setting.removesuffix("_key")
            near = difflib.get_close_matches(key, list(names), 1) or (list(names) if len(names) == 1 else [])
            way = f"set {full} = {near[0]!r}" if near else f"set {full} to the key that has the {what}"
            raise UserError(
                f"{full}: expected key {key!r} in each row, found {f'only {there}' if there else 'none'} in {where}; "
                f"{way}{_other_kind(names, source)}"
            )


def _other_kind(names: Mapping[str, Any], source: DataFiles) -> str:
    for kind in ("conversations", "completions", "documents"):
        other: tuple[str, ...] = tuple(getattr(source, setting) for setting in _KEYS[kind])
        if kind != source.kind and all(name in names for name in other):
            return f', or {source.section}.kind = "{kind}"'
    return ""


def parts(
    text: str, before: str = "", after: str = "", first: bool = True, last: bool = True
) -> Iterator[Document]:
    """Yield a text as documents of about ``PIECE`` characters, each with the text around it.

    ``before``, ``after``, ``first`` and ``last`` are of the whole text, which may itself be a part of a document.
    """
    start, stop = 0, 0
    while stop < len(text) or start == stop == 0:
        start, stop = stop, len(text)
        if stop - start > PIECE + PIECE // 4:
            window = text[start + PIECE - 1 : start + PIECE + PIECE // 16]
            stop = start + PIECE - 1 + (cut(window) or 1)
        yield Document(
            text[start:stop],
            before=text[max(0, start - CONTEXT) : start] if start else before,
            after=text[stop : stop + CONTEXT] if stop < len(text) else after,
            first=first and start == 0,
            last=last and stop == len(text),
        )
        if not text:
            return


_CUTS = ((r"\n(?=\S)", 1), (r"\S(?= \S)", 1))
_STRINGS = tuple((re.compile(pattern), shift) for pattern, shift in _CUTS)
_BYTES = tuple((re.compile(pattern.encode()), shift) for pattern, shift in _CUTS)


def cut(window: str | bytes) -> int | None:
    """Return a position of the window where tokens of usual tokenizers end: after a line, or else before a word.

    At least 1. None if there is none.
    """
    for pattern, shift in _STRINGS if isinstance(window, str) else _BYTES:
        match = pattern.search(window)  # type: ignore[arg-type]
        if match is not None:
            return match.start() + shift
    return None


def _text(row: Mapping[str, Any], setting: str, source: DataFiles, origin: Origin) -> str:
    key = getattr(source, setting)
    value, full_setting = row[key], f"{source.section}.{setting}"
    if not isinstance(value, str):
        hint = _hint(value, setting, source.section)
        raise UserError(
            f"{full_setting}: expected a string, found {_name(value)} in {key!r} of {origin}; {hint}"
        )
    _check_characters(value, full_setting, key, origin)
    return value


def _hint(value: Any, setting: str, section: str) -> str:
    if value is None:
        return "remove the row, or give it a text"
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return f'set {section}.kind = "conversations" for lists of messages'
    return (
        f"write it as a string, or set {section}.{setting} to the key of the {setting.removesuffix('_key')}"
    )


def _check_characters(text: str, setting: str, key: str, origin: object) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{setting}: expected text, found half of a surrogate pair at character {error.start} in {key!r} of "
            f"{origin}; write the character again as UTF-8"
        ) from None


def _conversation(row: Mapping[str, Any], source: DataFiles, origin: Origin) -> Conversation:
    key, setting = source.messages_key, f"{source.section}.messages_key"
    messages = row[key]
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else _name(messages)
        hint = "remove the row" if messages == [] else f"set {setting} to the key of such a list"
        raise UserError(
            f"{setting}: expected a list of messages, found {found} in {key!r} of {origin}; {hint}"
        )
    for number, message in enumerate(messages, start=1):
        where = f"message {number} in {key!r} of {origin}"
        if not isinstance(message, Mapping):
            raise UserError(
                f"{setting}: expected an object with role and content, found {_name(message)} as {where}; write "
                '{"role": "user", "content": "..."}'
            )
        if not isinstance(message.get("role"), str) or not ({"content", "tool_calls"} & message.keys()):
            raise UserError(
                f"{setting}: expected the keys role (a string) and content, found "
                f"{', '.join(map(repr, message)) or 'none'} in {where}; rename them"
            )
        role = message["role"]
        if role != ASSISTANT and difflib.get_close_matches(role.strip().lower(), [ASSISTANT], cutoff=0.77):
            raise UserError(
                f"{setting}: expected a role such as system, user or {ASSISTANT}, found {role!r} in {where}; did you "
                f"mean {ASSISTANT!r}? The text of other roles is not trained"
            )
        content = message.get("content")
        # Many templates would write None as a word. Only calls of tools may stand in place of a text.
        if not isinstance(content, str | list) and (content is not None or not message.get("tool_calls")):
            raise UserError(
                f"{setting}: expected a string as content, found {_name(content)} in {where}; write a string, or "
                "remove the row"
            )
        for text in strings_of(message):
            _check_characters(text, setting, key, origin)
    tools = row.get(TOOLS)
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise UserError(
            f"{setting}: expected a list of objects, found {_name(tools)} in {TOOLS!r} of {origin}; write a list, or "
            f"leave {TOOLS!r} out"
        )
    return Conversation(tuple(messages), tuple(tools) if tools else None, origin)


def strings_of(value: Any) -> Iterator[str]:
    """Yield all strings in nested values, keys of mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from strings_of(key)
            yield from strings_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from strings_of(each)


def _name(value: Any) -> str:
    return "nothing (null)" if value is None else type(value).__name__
