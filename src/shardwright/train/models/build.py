"""From the `[model]` section of a configuration to the model."""

from __future__ import annotations

from shardwright.extend import ExtensionError
from shardwright.train.config import ModelConfig
from shardwright.train.errors import UserError
from shardwright.train.models.decoder import Decoder
from shardwright.train.models.kinds import kind_of, offers_of
from shardwright.train.models.outputs import check_class
from shardwright.train.models.presets import Shape

#: What the trainer asks of each model.
_NEEDED = ("config", "tok_embeddings", "layers", "norm", "output")


def model_of(shape: Shape) -> Decoder:
    """The model of that shape, on the default device (`with torch.device("meta")` too)."""
    model = offers_of(shape).model(shape)
    missing = (
        [name for name in _NEEDED if not hasattr(model, name)] if isinstance(model, Decoder) else ["Decoder"]
    )
    if missing:
        raise UserError(
            f"model.kind: expected Offers.model of kind {kind_of(shape).name!r} to return a Decoder with "
            f"{', '.join(_NEEDED)}, found a {type(model).__name__} without {', '.join(missing)}"
        )
    try:
        check_class(kind_of(shape).name, model, model.auxiliary)
    except ExtensionError as error:
        raise UserError(str(error)) from error
    return model


def build_model(model_config: ModelConfig, vocab_size: int) -> Decoder:
    """The model a `[model]` section describes, on the default device.

    `vocab_size` is the tokenizer's. Raises UserError where the model's vocabulary is smaller; a larger one is
    fine, the rows beyond are never used.
    """
    shape = model_config.shape()
    if shape.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size: expected at least the tokenizer's {vocab_size}, found {shape.vocab_size}"
        )
    return model_of(shape)
