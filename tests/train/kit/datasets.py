"""The data of a run from bytes in memory."""

from __future__ import annotations

import numpy as np

from shardwright.train.config import Config
from shardwright.train.data.dataset import VALIDATION_SEED, Dataset
from shardwright.train.data.samples.packing import pack
from shardwright.train.data.samples.stream import Part, Source, Stream
from shardwright.train.data.tokens.tokenizers import Bytes
from shardwright.train.data.tokens.tokens import Tokens


def byte_dataset(config: Config, training: bytes, validation: bytes, sha256: str) -> Dataset:
    """The samples of two texts whose bytes are the tokens. Raises UserError where a text is shorter than a sample."""
    data = config.data

    def stream(name: str, text: bytes, seed: int) -> Stream:
        ids = np.frombuffer(text, np.uint8)
        tokens = Tokens(ids, np.array([len(ids)]), None, name)
        part = Part(tokens, pack(tokens, config.train.seq_len, data.packing, separate=data.separates))
        return Stream([Source(name, (part,))], [1.0], seed, separate=data.separates)

    rest = stream("the validation text", validation, VALIDATION_SEED) if config.validation.every else None
    return Dataset(Bytes(), stream("the training text", training, config.run.seed), rest, sha256)
