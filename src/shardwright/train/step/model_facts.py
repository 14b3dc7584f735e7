"""Facts about a model before it is sharded."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.train.config import ModelConfig
from shardwright.train.config.catalog.kinds import is_of_this_package, model_in_words
from shardwright.train.finetune import adapters
from shardwright.train.models.language_model import LanguageModel


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model before it is sharded.

    Attributes:
        in_words: the model in messages.
        parameters: how many it has.
        flops_per_token: floating-point operations of forward and backward for each trained token.
        draws: whether forward draws random numbers.
        foreign: whether its code is not of this package.
    """

    in_words: str
    parameters: int
    flops_per_token: int
    draws: bool
    foreign: bool

    @classmethod
    def of(cls, plain: LanguageModel, model: ModelConfig, seq_len: int) -> ModelFacts:
        """Return the facts of the model that these settings have made."""
        shape = model.shape()
        skipped = 0 if getattr(plain, "counts_frozen", False) else adapters.skipped_flops(plain)
        return cls(
            in_words=model_in_words(shape, model.kind),
            parameters=plain.num_params(),
            flops_per_token=plain.flops_per_token(seq_len) - skipped,
            draws=plain.draws,
            foreign=plain.foreign or not is_of_this_package(shape),
        )
