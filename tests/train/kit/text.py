"""Texts as bytes, joined and cut into samples in a few lines: what the trainer's data are compared with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shardwright.train.data.samples.mixing import SampleOrder


@dataclass(frozen=True, eq=False)
class Text:
    """A text as tokens, uint8 [N]: the part for training and the rest."""

    train: Tensor
    validation: Tensor

    @property
    def sha256(self) -> str:
        return hashlib.sha256(bytes(torch.cat([self.train, self.validation]).tolist())).hexdigest()


def text_of(content: bytes, validation_fraction: float = 0.0, ends: Sequence[int] = ()) -> Text:
    """``ends``: of the documents. The one in which the cut falls is for validation, unless it is longer than that."""
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    wanted = int(len(tokens) * validation_fraction)
    cut = len(tokens) - wanted
    begin = max((end for end in ends if end <= cut), default=0)
    if wanted and begin and min(end for end in ends if end > cut) - begin <= wanted:
        cut = begin
    return Text(tokens[:cut], tokens[cut:])


def random_text() -> Text:
    """Random bytes: any mistake in who sees what changes the loss."""
    tokens = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    return Text(tokens[:3000], tokens[3000:])


def pydoc() -> bytes:
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values()).encode()


def ends_of_pydoc() -> list[int]:
    """A document has the empty line behind it, if there is one."""
    from pydoc_data.topics import topics

    *ends, last = accumulate(len(f"{text}\n\n".encode()) for text in topics.values())
    return [*ends, last - 2]


def joined(*paths: Path) -> bytes:
    """The texts of .txt and .jsonl files, each beginning in a line of its own."""
    text = b""
    for path in paths:
        if text and not text.endswith(b"\n"):
            text += b"\n"
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            content = "\n".join(json.loads(line)["text"] for line in content.split("\n") if line.strip())
        text += content.encode()
    return text


def batch(
    text: Text,
    seed: int,
    first: int,
    count: int,
    seq_len: int,
    split: Literal["train", "validation"] = "train",
) -> tuple[Tensor, Tensor]:
    """Samples `first` to `first + count - 1` of a run: inputs and targets, int64 [count, seq_len]."""
    tokens: Tensor = getattr(text, split)
    order = SampleOrder((len(tokens) - 1) // seq_len, seed)
    starts = [order[first + number] * seq_len for number in range(count)]
    rows = torch.stack([tokens[start : start + seq_len + 1] for start in starts]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
