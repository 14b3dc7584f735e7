"""Hugging Face's names and configuration for the model of any shape here. The tables are in
`native/hugging_face_tables.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.checkpoint import TensorSource
from shardwright.train.config.catalog.kinds import kinds
from shardwright.train.config.shapes.presets import Shape
from shardwright.train.errors import UserError
from shardwright.train.models.offers import offer, offers_of_kind


def key_map(shape: Shape) -> dict[str, TensorSource | None]:
    """Hugging Face's name of every tensor of the model of that shape.

    Llama has the names of ``LlamaForCausalLM``, the hybrid those of ``NemotronHForCausalLM`` where that has such a
    tensor (see :func:`config_json`), and ``mtp.*`` for the head that predicts one token further.
    """
    names: dict[str, TensorSource | None] = offer(shape, "key_map", "Hugging Face's names")(shape)
    return names


def config_json(shape: Shape) -> dict[str, Any]:
    """Return the content of ``config.json`` beside the weights.

    transformers reads the configs of a Llama, and of a hybrid of Mamba-2, attention and dense layers with an output
    layer of its own, as the same model. Nemotron-H routes to experts in another way (sigmoid scores with a bias, where
    ours are a softmax), ties no weights and has another multi-token prediction. So the config of a hybrid with any of
    these names an architecture that nothing else knows.
    """
    values: dict[str, Any] = offer(shape, "config_json", "config.json")(shape)
    return values


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape of the model that a ``config.json`` describes.

    Raises:
        UserError: it describes a model, or a variant of one, that is none of those here.
    """
    readers = {name: read for kind in kinds for name, read in offers_of_kind(kind).shapes.items()}
    kind = config.get("model_type")
    if kind not in readers:
        *others, last = readers
        raise UserError(f"config.json: expected model_type {', '.join(others)} or {last}, found {kind!r}")
    try:
        return readers[kind](config)
    except KeyError as error:
        raise UserError(f"config.json: expected a value for {error}, found none") from None
