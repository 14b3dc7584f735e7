"""From the `[model]` section of a configuration to the model."""

from __future__ import annotations

from shardwright.engine.extend import ExtensionError
from shardwright.train.config import ModelConfig
from shardwright.train.config.catalog.kinds import kind_of, model_in_words
from shardwright.train.config.shapes.presets import Shape
from shardwright.train.errors import UserError, as_user_errors
from shardwright.train.models.language_model import NEEDED, LanguageModel, missing_members
from shardwright.train.models.offers import offers_of
from shardwright.train.models.outputs import check_class
from shardwright.train.models.vocabulary import check_vocabulary


def model_of(shape: Shape) -> LanguageModel:
    """Return the model of that shape, on the default device (`with torch.device("meta")` too)."""
    model = offers_of(shape).model(shape)
    missing = missing_members(model)
    if missing:
        raise UserError(
            f"model.kind: expected Offers.model of kind {kind_of(shape).name!r} to return a LanguageModel (see "
            f"shardwright.train.extend) with {', '.join((*NEEDED, *getattr(model, 'parts', ())))}, found a "
            f"{type(model).__name__} without {', '.join(missing)}"
        )
    with as_user_errors(ExtensionError):
        check_class(model_in_words(shape), model, model.auxiliary)
    return model


def build_model(model_config: ModelConfig, vocab_size: int) -> LanguageModel:
    """Return the model a `[model]` section describes, on the default device.

    `vocab_size` is the tokenizer's. Raises UserError where the model's vocabulary is smaller; a larger one is
    fine, the rows beyond are never used.
    """
    shape = model_config.shape()
    check_vocabulary(shape, vocab_size)
    return model_of(shape)
