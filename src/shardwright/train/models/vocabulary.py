"""The vocabulary of the model: as large as the tokenizer's unless `model.vocab_size` is set.

Nothing here imports torch, so that a wrong size is refused before any rank starts.
"""

from __future__ import annotations

from shardwright.train.config import Config
from shardwright.train.config.catalog.kinds import kind_of
from shardwright.train.config.shapes.presets import Shape
from shardwright.train.data.tokens.tokenizers import open_tokenizer
from shardwright.train.errors import UserError

KEY = "vocab_size"


def with_vocabulary(config: Config) -> Config:
    """Return the configuration with the `model.vocab_size` of the tokenizer, if it has none. Presets keep theirs for
    bytes.

    Raises:
        UserError: the vocabulary that is set is smaller, or the tokenizer cannot be read.
    """
    size = open_tokenizer(config.data.tokenizer).vocab_size
    follows = config.model.vocab_size is None and KEY in kind_of(config.model.shape()).numbers
    if follows and config.data.tokenizer != "bytes":
        config = config.model_copy(update={"model": config.model.model_copy(update={KEY: size})})
    check_vocabulary(config.model.shape(), size)
    return config


def check_vocabulary(shape: Shape, size: int) -> None:
    """Raise UserError if a model has fewer tokens than the tokenizer. More are fine: these rows are never used."""
    if shape.vocab_size >= size:
        return
    least = f"at least the tokenizer's {size}"
    key, expected, way = KEY, least, f"set model.{KEY} to {size} or leave it out, or"
    if KEY not in kind_of(shape).numbers:
        key, expected, way = "path", f"a model with a vocabulary of {least}", "take another model, or"
    raise UserError(
        f"model.{key}: expected {expected}, found {shape.vocab_size}; {way} set data.tokenizer to a tokenizer with "
        "at most as many tokens"
    )
