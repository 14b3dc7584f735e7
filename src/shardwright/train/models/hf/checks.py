"""Checks of a job with a model of transformers, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardwright.train.config import Config
from shardwright.train.config.shapes.foreign import HuggingFaceShape
from shardwright.train.errors import UserError
from shardwright.train.models.hf.building import config_of
from shardwright.train.models.hf.context import check_divides
from shardwright.train.models.hf.documents import separation_of
from shardwright.train.models.hf.transformers_model import HuggingFaceModel, places_of_weights


def check(shape: HuggingFaceShape, config: Config) -> None:
    """Refuse a job that the model cannot run.

    Raises:
        UserError: transformers has no such model, its weights are missing or damaged, or a key does not fit it.
    """
    settings = config_of(shape)
    if config.train.compile != "none" and not _class_of(settings)._can_compile_fullgraph:
        raise UserError(
            f"train.compile: expected 'none' with a model of type {settings.model_type!r}, found "
            f"{config.train.compile!r}; transformers says that its layers cannot be compiled as one graph"
        )
    if (ranks := config.parallel.parts_of("samples")) > 1:
        check_divides(settings, ranks, config.data.separates)
    # What its constructor and its files say is known before ranks start.
    with torch.device("meta"):
        model = HuggingFaceModel(replace(shape, weights="pretrained"))  # which draws no values
    if shape.weights == "pretrained":
        places_of_weights(model)


def try_ahead(shape: HuggingFaceShape, config: Config) -> None:
    """Find how the model keeps documents apart, with a small model.

    Raises:
        UserError: it mixes them.
    """
    if config.data.separates:
        separation_of(config_of(shape))


def _class_of(settings: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    return classes[0] if isinstance(classes, tuple) else classes
