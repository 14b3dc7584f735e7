"""Text files as one long row of byte tokens, its split into training and validation, and batches cut from it.

The order in which batches are drawn is decided in `order`, not here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shardwright.train.config import DataConfig
from shardwright.train.data.order import SampleOrder
from shardwright.train.errors import UserError

VOCAB_SIZE = 256


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as tokens: uint8, one dimension. Its last part, for validation, shares nothing with the rest."""

    train: Tensor
    validation: Tensor
    sha256: str
    """Of the bytes of the whole text, as hexadecimal digits."""
    vocab_size: int = VOCAB_SIZE

    def windows(self, seq_len: int, split: Literal["train", "validation"] = "train") -> int:
        """How many samples of `seq_len` tokens and as many targets a part holds. Raises UserError if none."""
        tokens = getattr(self, split)
        windows = (len(tokens) - 1) // seq_len
        if windows < 1:
            hint = "data.source with more text" if split == "train" else "a larger data.validation_fraction"
            raise UserError(
                f"train.seq_len: expected at most {max(len(tokens) - 1, 0)}, since the {split} part of the corpus "
                f"has {len(tokens)} tokens, found {seq_len}; use a shorter sequence or {hint}"
            )
        return windows


def load_corpus(config: DataConfig) -> Corpus:
    """The text of a `[data]` section as tokens.

    Raises UserError for files that are missing, unreadable, not UTF-8, empty or without the key they should
    have.
    """
    text = _read_pydoc() if config.source == "pydoc" else _read_files(config)
    if not text:
        raise UserError(f"data.source: expected text, found none in {_names(config)}")
    tokens = torch.frombuffer(text, dtype=torch.uint8)
    cut = len(tokens) - int(len(tokens) * config.validation_fraction)
    return Corpus(tokens[:cut], tokens[cut:], hashlib.sha256(text).hexdigest())


def batch(
    corpus: Corpus,
    seed: int,
    first_index: int,
    count: int,
    seq_len: int,
    split: Literal["train", "validation"] = "train",
) -> tuple[Tensor, Tensor]:
    """Samples `first_index` to `first_index + count - 1`: inputs and targets, int64, [count, seq_len].

    The targets are the inputs moved on by one token. Raises UserError where `seq_len` exceeds the corpus.
    """
    order = SampleOrder(corpus.windows(seq_len, split), seed)
    tokens: Tensor = getattr(corpus, split)
    starts = (order[first_index + number] * seq_len for number in range(count))
    rows = torch.stack([tokens[start : start + seq_len + 1] for start in starts]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def encode(text: str) -> Tensor:
    """The tokens of a text: int64, one dimension."""
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64)


def decode(tokens: Tensor | Sequence[int]) -> str:
    """The text of tokens. Bytes that are not UTF-8, as a model may produce, become replacement characters."""
    numbers: list[int] = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    # A vocabulary may be larger than the tokenizer's; tokens beyond it stand for nothing.
    return bytes(number if number < VOCAB_SIZE else 0xFF for number in numbers).decode("utf-8", "replace")


def _read_pydoc() -> bytearray:
    from pydoc_data.topics import topics  # type: ignore[import-untyped]  # 0.5 MB of text: only when asked for

    return bytearray("\n\n".join(topics.values()).encode("utf-8"))


def _read_files(config: DataConfig) -> bytearray:
    text = bytearray()
    for path in map(Path, _sources(config)):
        if text and not text.endswith(b"\n"):
            text += b"\n"
        text += _read(path, config.text_key)
    return text


def _sources(config: DataConfig) -> tuple[str, ...]:
    return (config.source,) if isinstance(config.source, str) else config.source


def _names(config: DataConfig) -> str:
    return ", ".join(_sources(config))


def _read(path: Path, text_key: str) -> bytes:
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"data.source: expected pydoc or the path of a .txt or .jsonl file, found {path}")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"data.source: expected a file, found nothing at {path}") from None
    except OSError as error:
        raise UserError(f"data.source: cannot read {path}: {error.strerror}") from None
    try:
        decoded = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.source: expected UTF-8 text, found byte 0x{content[error.start]:02x} "
            f"at offset {error.start} of {path}"
        ) from None
    return (
        content if path.suffix == ".txt" else "\n".join(_documents(path, decoded, text_key)).encode("utf-8")
    )


def _documents(path: Path, content: str, text_key: str) -> Iterator[str]:
    # Only "\n" ends a line of JSON: str.splitlines would also cut at characters a string may hold.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"of line {number} of {path}"
        try:
            document = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"data.source: expected JSON, found an error at column {error.colno} {where}"
            ) from None
        except (ValueError, RecursionError):  # beyond what Python reads
            raise UserError(
                f"data.source: expected JSON, found nesting that is too deep or a number that is too long {where}"
            ) from None
        if not isinstance(document, dict) or text_key not in document:
            raise UserError(f"data.text_key: expected key {text_key!r}, found none {where}")
        text = document[text_key]
        if not isinstance(text, str):
            raise UserError(
                f"data.text_key: expected a string, found {type(text).__name__} in {text_key!r} {where}"
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(
                f"data.text_key: expected text, found half of a surrogate pair in {text_key!r} {where}"
            )
        yield text
