"""Jobs whose samples are divided by ranks, on a text of several documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwright.train.config import Config
from shardwright.train.data.dataset import VALIDATION_SEED, Dataset
from shardwright.train.data.samples.packing import pack
from shardwright.train.data.samples.stream import Part, Source, Stream
from shardwright.train.data.tokens.tokenizers import Bytes
from shardwright.train.data.tokens.tokens import Tokens
from tests.train.kit.jobs import tiny
from tests.train.kit.text import random_text


def job(context: int = 2, **sections: dict[str, Any]) -> Config:
    """The tiny job with 4 query heads, and samples that `context` ranks divide."""
    heads = (
        {} if sections.get("model", {}).get("kind") in ("hf", "python") else {"n_heads": 4, "n_kv_heads": 2}
    )
    sections["model"] = heads | sections.get("model", {})
    sections["train"] = {"micro_batch": 1, "global_batch": 8} | sections.get("train", {})
    sections["parallel"] = {"engine": "shardwright", "context": context} | sections.get("parallel", {})
    # Adam makes large steps of the rounding of tiny gradients.
    sections["optimizer"] = {"warmup_steps": 0, "eps": 1e-3} | sections.get("optimizer", {})
    return tiny(**sections)


def documents(config: Config) -> Dataset:
    """Random bytes as documents of 1 to 60 tokens."""
    text, draw = random_text(), torch.Generator().manual_seed(11)

    def stream(name: str, ids: torch.Tensor, seed: int) -> Stream:
        lengths = torch.randint(1, 61, (len(ids) // 20,), generator=draw)
        ends = lengths.cumsum(0)
        ends = ends[ends < len(ids)].tolist() + [len(ids)]
        tokens = Tokens(ids.numpy().astype(np.uint8), np.array(ends), None, name)
        packing = pack(tokens, config.train.seq_len, config.data.packing, separate=config.data.separates)
        return Stream([Source(name, (Part(tokens, packing),))], [1.0], seed, separate=config.data.separates)

    training = stream("the training text", text.train, config.run.seed)
    validation = stream("the validation text", text.validation, VALIDATION_SEED)
    return Dataset(Bytes(), training, validation if config.validation.every else None, text.sha256)
