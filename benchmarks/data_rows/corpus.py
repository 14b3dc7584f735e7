"""Documents and a tokenizer that any CPython can make: its own sources and reference text, cut to lengths of web text.

The lengths are log-normal: a median of 1,600 characters, and one document in a hundred above 16,000.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VOCABULARY = 8192
END = "<|endoftext|>"
TEXTS_OF_TRAINING = 4_000_000
"""Characters that the tokenizer learns its merges from."""


class Corpus(NamedTuple):
    """Files of one corpus."""

    documents: Path
    """.jsonl, a text per line."""
    tokenizer: Path
    """A folder with tokenizer.json."""
    count: int
    nbytes: int


def make(folder: Path, megabytes: float) -> Corpus:
    """Write a corpus of about so many MB, and a byte-level BPE that is trained on it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = list(_texts(int(megabytes * 1e6)))
    documents = folder / "documents.jsonl"
    with documents.open("w", encoding="utf-8") as stream:
        for text in texts:
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, TEXTS_OF_TRAINING), trainer)
    home = folder / "tokenizer"
    home.mkdir()
    tokenizer.save(str(home / "tokenizer.json"))
    return Corpus(documents, home, len(texts), documents.stat().st_size)


def _texts(nbytes: int) -> Iterator[str]:
    """Documents of the sources in another order than that of the files, so that neighbours differ."""
    draw = random.Random(0)
    made = 0
    while made < nbytes:
        for text in _files(draw):
            start = 0
            while start < len(text):
                length = max(1, round(draw.lognormvariate(7.4, 1.0)))
                document = text[start : start + length]
                start += length
                made += len(document)
                yield document
                if made >= nbytes:
                    return


def _files(draw: random.Random) -> Iterator[str]:
    from pydoc_data.topics import topics  # type: ignore[import-untyped]

    home = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in home.rglob("*.py") if "site-packages" not in path.parts)
    draw.shuffle(paths)
    yield from topics.values()
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # test data of other encodings
            continue


def _first(texts: list[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text
