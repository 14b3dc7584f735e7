"""Texts as token ids and back: bytes, or a tokenizer.json of Hugging Face.

    tokenizer = open_tokenizer("llama/tokenizer.json")   # or a folder, a hub name, or "bytes"

Nothing here adds tokens to a text: where documents begin and end is decided in ``encoding``, and in a chat by its
template. A tokenizer turns a text that spells a special token into that token. Its ``literal`` and ``renamed`` do not.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from shardwright.train.config.shapes.hub import fetch_folder, is_hub_name, pinned
from shardwright.train.errors import UserError

CharRange: TypeAlias = tuple[int, int]
"""The first character of a token in its text, and the one after its last."""

KEY = "data.tokenizer"
FILE, CONFIG, TEMPLATE, SPECIAL, GENERATION = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)
#: Ends of names that are files, and no models of the hub.
_ENDINGS = (".json", ".model", ".txt", ".jinja")
#: The texts of a token at the end of documents, in the order of preference, where no configuration names one.
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
#: Texts that may stand before a text that goes on inside a line, so that no token joins both.
_LEADS = ("\n", ":", "0", "x", "\u4e00", "\ue000")
#: Around the name that a special token has in a renamed tokenizer. Unicode keeps both out of all texts.
_NAME_BEGINS, _NAME_ENDS = "\ufdd4", "\ufdd5"


class Tokenizer(Protocol):
    """The methods that the trainer needs from a tokenizer. It can be pickled: other processes use it.

    Attributes:
        vocab_size: the largest id + 1.
        end: the id that ends a document.
        end_token: the text of the token `end`.
        ends: ids at which a generated text ends: `end`, and those of the model's generation settings.
        begin: the id that the tokenizer itself puts before every text. Chat templates write it, so chats do not add it.
        begin_token: the text of the token `begin`.
        special: ids that stand for no text, such as those at the end of a turn.
        reserved: ids that a text should not become by spelling them: special ones, and those that begin and end
            documents.
        fingerprint: a digest of all that decides the ids of a text.
        chat_template: the source of its jinja template.
    """

    vocab_size: int
    end: int | None
    end_token: str | None
    ends: tuple[int, ...]
    begin: int | None
    begin_token: str | None
    special: frozenset[int]
    reserved: frozenset[int]
    fingerprint: str
    chat_template: str | None

    @property
    def names(self) -> Mapping[str, str]:
        """The texts of special tokens by the names that chat templates use: bos_token, eos_token, ..."""

    @property
    def file(self) -> Path | None:
        """The tokenizer.json, under any name, that an export copies with the files beside it."""

    def spelled(self, text: str) -> list[CharRange]:
        """Places where a text spells reserved tokens."""

    @property
    def literal(self) -> Tokenizer:
        """The same tokenizer for texts that spell no token: what they spell stays text. It does not decode."""

    def renamed(self) -> tuple[Tokenizer, Mapping[str, str]]:
        """Return the same tokenizer, whose reserved tokens have names that no text has, and these names by the usual
        ones. It does not decode."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Return the ids of each text; ``bytes`` where every id is one."""

    def encode_part(self, text: str, before: str, after: str) -> Sequence[int]:
        """Return the ids of a text that stands between two others, which are not encoded."""

    def encode_places(self, text: str, inside: bool = False) -> tuple[list[int], list[CharRange]]:
        """Ids, and the characters of each. ``inside``: the text goes on after another one, in the same line."""

    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """Every byte of the UTF-8 text is a token. No token is special."""

    vocab_size = 256
    end: int | None = None
    end_token: str | None = None
    ends: tuple[int, ...] = ()
    begin: int | None = None
    begin_token: str | None = None
    special: frozenset[int] = frozenset()
    reserved: frozenset[int] = frozenset()
    names: Mapping[str, str] = {}
    fingerprint = "bytes"
    chat_template: str | None = None
    file: Path | None = None

    def spelled(self, text: str) -> list[CharRange]:
        return []

    @property
    def literal(self) -> Tokenizer:
        return self

    def renamed(self) -> tuple[Tokenizer, Mapping[str, str]]:
        return self, {}

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode("utf-8") for text in texts]

    def encode_part(self, text: str, before: str, after: str) -> Sequence[int]:
        return text.encode("utf-8")

    def encode_places(self, text: str, inside: bool = False) -> tuple[list[int], list[CharRange]]:
        places = [
            (number, number + 1)
            for number, character in enumerate(text)
            for _ in range(len(character.encode("utf-8")))
        ]
        return list(text.encode("utf-8")), places

    def decode(self, ids: Sequence[int]) -> str:
        """Ids that are not UTF-8, as a model may produce, become replacement characters."""
        # A model's vocabulary may be larger than the tokenizer's; ids beyond it stand for nothing.
        return bytes(number if number < 256 else 0xFF for number in ids).decode("utf-8", "replace")


class FromFile:
    """A tokenizer.json, read by the library tokenizers, with the settings in the files beside it.

    Truncation and padding that the file may ask for are switched off: they would cut documents in silence. Special
    tokens in a text are recognised, as everywhere in Hugging Face's libraries; not by `literal`.

    Args:
        path: of the file.

    Raises:
        UserError: the file is missing or damaged, or the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        content = _content(path)
        self.file = path
        self._tokenizer = _parsed(content, path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.begin = self._first_id()
        self.begin_token: str | None = None if self.begin is None else self._tokenizer.id_to_token(self.begin)
        # It would add tokens, and some move the places of tokens past the blanks before them.
        self._tokenizer.post_processor = None
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{KEY}: expected a vocabulary, found an empty one in {path}")
        self.vocab_size = max(vocabulary.values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in added.items() if token.special)
        config = _settings(path.with_name(CONFIG))
        self.names = _names(config, _settings(path.with_name(SPECIAL)))
        self.end = self._end(vocabulary, {token.content for token in added.values()})
        self.end_token: str | None = None if self.end is None else self._tokenizer.id_to_token(self.end)
        self.ends = self._ends(_settings(path.with_name(GENERATION)).get("eos_token_id"))
        marks = {each for each in (self.begin, self.end, *self.ends) if each is not None}
        texts = {number: self._tokenizer.id_to_token(number) for number in self.special | marks}
        # An end token that was never added may be any word. It is reserved if it looks like a mark.
        self._reserved_texts: dict[str, int] = {
            text: number for number, text in texts.items() if number in added or text[:1] in ("<", "[")
        }
        self.reserved = frozenset(self._reserved_texts.values())
        longest_first = sorted(self._reserved_texts, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self.chat_template = _template(config, path.with_name(TEMPLATE))
        facts = f"{hashlib.sha256(content).hexdigest()} {self.begin} {self.end}"
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()
        self._prefixes = self._adds_prefix()

    def __reduce__(self) -> tuple[type[FromFile], tuple[Path]]:
        return FromFile, (self.file,)

    def spelled(self, text: str) -> list[CharRange]:
        return [] if self._spelled is None else [match.span() for match in self._spelled.finditer(text)]

    @cached_property
    def literal(self) -> Tokenizer:
        return self._with(self._renamed_library(literal=True))

    def renamed(self) -> tuple[Tokenizer, Mapping[str, str]]:
        return self._renamed

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, Mapping[str, str]]:
        return self._with(self._renamed_library(literal=False)), self._new_names()

    def _with(self, library: Any) -> FromFile:
        other = copy.copy(self)
        other._tokenizer = library
        return other

    def _new_names(self) -> dict[str, str]:
        return {
            text: f"{_NAME_BEGINS}{self.fingerprint[:16]} {number}{_NAME_ENDS}"
            for text, number in self._reserved_texts.items()
        }

    def _renamed_library(self, literal: bool) -> Any:
        """Return the library's tokenizer with other names for reserved tokens, and equal ids.

        The library can ignore added tokens in a text. Models of words and of pieces (WordLevel, Unigram) would still
        find them in their vocabulary.
        """
        content, names = json.loads(self._tokenizer.to_str()), self._new_names()
        for token in content["added_tokens"]:
            if token["content"] in names:
                token.update(content=names[token["content"]], special=True, normalized=False)
        model = content["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        else:
            model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            pairs = [
                tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in model["merges"]
            ]
            model["merges"] = [list(pair) for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
        library = _parsed(json.dumps(content).encode(), self.file)
        library.encode_special_tokens = literal
        return library

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [each.ids for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_part(self, text: str, before: str, after: str) -> Sequence[int]:
        if not before and not after:
            return self.encode(text)
        ids, places = self._encoded(before + text + after)
        start, stop = len(before), len(before) + len(text)
        if not any(first < edge < last for first, last in places for edge in (start, stop)):
            return [number for number, place in zip(ids, places, strict=True) if start <= place[0] < stop]
        return self.encode_places(text, inside=bool(before))[0]

    def encode_places(self, text: str, inside: bool = False) -> tuple[list[int], list[CharRange]]:
        if not (inside and self._prefixes):
            return self._encoded(text)
        for lead in _LEADS:
            ids, places = self._encoded(lead + text)
            if not any(first < len(lead) < last for first, last in places):
                kept = [number for number, place in enumerate(places) if place[0] >= len(lead)]
                moved = [(places[each][0] - len(lead), places[each][1] - len(lead)) for each in kept]
                return [ids[each] for each in kept], moved
        return self._encoded(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are shown. Ids beyond the vocabulary stand for nothing."""
        known = [number for number in ids if 0 <= number < self.vocab_size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=False)
        return text

    def _encoded(self, text: str) -> tuple[list[int], list[CharRange]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _first_id(self) -> int | None:
        """Return the id that the file's own post-processor puts before a text; None for none."""
        text = "a"
        plain = self._tokenizer.encode(text, add_special_tokens=False).ids
        whole = self._tokenizer.encode(text, add_special_tokens=True).ids
        return whole[0] if len(whole) > len(plain) and whole[:1] != plain[:1] else None

    def _end(self, vocabulary: Mapping[str, int], added: set[str]) -> int | None:
        name = self.names.get("eos_token")
        if name is not None:
            if name not in vocabulary:
                raise UserError(
                    f"{KEY}: expected the eos_token of {self.file.with_name(CONFIG)} in the vocabulary, found no "
                    f"{name!r} in {self.file}; take both files from the same model"
                )
            return vocabulary[name]
        return next((vocabulary[name] for name in _USUAL_ENDS if name in added), None)

    def _ends(self, value: object) -> tuple[int, ...]:
        """Return the end of documents, and the ids of the generation settings: an int, a list of them, or None."""
        listed = value if isinstance(value, list) else [value]
        ids = [each for each in listed if type(each) is int and 0 <= each < self.vocab_size]
        first = [self.end] if self.end is not None and self.end not in ids else []
        return tuple(dict.fromkeys([*first, *ids]))

    def _adds_prefix(self) -> bool:
        """Return whether a text at the start has other ids than inside a line (SentencePiece puts a blank before
        it)."""
        ids, places = self._encoded("\na")
        inside = [number for number, place in zip(ids, places, strict=True) if place[0] >= 1]
        return inside != self.encode("a")


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a setting: ``bytes``, the path of a tokenizer.json or of its folder, or a hub name.

    A hub name is ``owner/model`` or ``owner/model@revision``. Only its tokenizer files are fetched, from HF_ENDPOINT
    if that is set.

    Raises:
        UserError: nothing is there, a file is damaged, or a library is not installed.
    """
    if name == "bytes":
        return Bytes()
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if path.is_dir():
        if (path / FILE).is_file():
            return FromFile(path / FILE)
        slow = next(
            (each for each in ("tokenizer.model", "spiece.model", "vocab.json") if (path / each).is_file()),
            None,
        )
        hint = (
            f"; {slow} is of an older format: open it with transformers' AutoTokenizer, and save_pretrained a new one"
            if slow
            else "; set the folder of a model"
        )
        raise UserError(f"{KEY}: expected {FILE} in {path}, found none{hint}")
    if path.is_file():
        return FromFile(path)
    if difflib.get_close_matches(name.lower(), ["bytes"], cutoff=0.8):
        raise UserError(f"{KEY}: found nothing at {name}; did you mean bytes?")
    if is_hub_name(name) and not name.endswith(_ENDINGS):
        return FromFile(fetch_folder(name, FILE, (CONFIG, TEMPLATE, SPECIAL, GENERATION), KEY) / FILE)
    raise UserError(
        f"{KEY}: expected bytes, the path of a {FILE} or of its folder, or a hub name, found nothing at {name}"
    )


def pinned_name(name: str, tokenizer: Tokenizer) -> str:
    """Return the setting of an open tokenizer; a hub name has the commit of the tokenizer's files as its revision."""
    if tokenizer.file is None or os.path.exists(os.path.expanduser(name)):
        return name
    return pinned(name, tokenizer.file)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{KEY}: cannot read {path}: {error.strerror}") from None


def _parsed(content: bytes, path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise UserError(
            f"{KEY}: {path} needs the package tokenizers, which is not installed; install the extra data"
        ) from None
    try:
        return Library.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises Exception itself
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{KEY}: expected a {FILE} of Hugging Face, found something else at {path} ({reason}); copy it again, or "
            "save it with a newer version of tokenizers"
        ) from None


def _settings(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, which may be absent."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{KEY}: expected a JSON object, found a damaged file at {path} ({error})") from None
    return content


def _names(*settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by their names; of several settings the first counts."""
    names: dict[str, str] = {}
    for each in settings:
        for name, value in each.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(text, str):
                names.setdefault(name, text)
    return names


def _template(config: Mapping[str, Any], path: Path) -> str | None:
    if path.is_file():
        return _content(path).decode("utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # several, each with its name
        by_name = {each.get("name"): each.get("template") for each in value if isinstance(each, Mapping)}
        value = by_name.get("default")
    return value if isinstance(value, str) else None
