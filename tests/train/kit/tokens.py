"""Tokenised documents that tests of the data make up: token t of document d has an id that names both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.train.data.samples.packing import PackingName, pack
from shardwright.train.data.samples.stream import Part, Source
from shardwright.train.data.tokens.tokens import Tokens


def tokens_of(
    lengths: Sequence[int],
    trained: Sequence[int] | None = None,
    first_id: int = 1,
    fingerprint: str = "made up",
) -> Tokens:
    """Documents of these lengths; ids count up from `first_id` over all of them, so that each token has its own."""
    ids = np.arange(first_id, first_id + sum(lengths), dtype=np.uint32)
    flags = None if trained is None else np.array(trained, np.uint8)
    return Tokens(ids, np.cumsum(np.array(lengths, np.int64)), flags, fingerprint)


def random_tokens(
    seed: int, documents: int, longest: int, *, masked: bool = False, first_id: int = 1
) -> Tokens:
    """Documents of 0 to `longest` tokens; `masked`: about a third of the tokens are trained."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, longest + 1, documents)
    trained = generator.random(int(lengths.sum())) < 0.3 if masked else None
    return tokens_of(lengths.tolist(), None if trained is None else trained.astype(int).tolist(), first_id)


def source_of(
    tokens: Tokens, seq_len: int, packing: PackingName, *, separate: bool, name: str = "made up"
) -> Source:
    return Source(name, (Part(tokens, pack(tokens, seq_len, packing, separate=separate)),))
