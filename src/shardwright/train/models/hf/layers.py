"""The layers of a model of transformers, and the same model with some of them, for plans of models with many layers."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.train.config.catalog.kinds import Layers
from shardwright.train.config.shapes.foreign import CONFIG, HuggingFaceShape
from shardwright.train.models.hf.building import build, config_of, units_in

#: Attributes in which a layer has its own number.
_INDEX = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"})
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Description(NamedTuple):
    """A model without its values.

    Attributes:
        blocks: the name of the list of layers.
        layers: for each layer a value that is equal for layers that do the same.
        rest: the same of all other modules.
    """

    blocks: str
    layers: tuple[Hashable, ...]
    rest: Hashable


@functools.lru_cache(64)
def described(shape: HuggingFaceShape) -> Description:
    """Return the modules of the model: their classes, parameters, buffers and plain attributes.

    Raises:
        UserError: transformers cannot build the model.
    """
    with torch.device("meta"):
        model = build(replace(shape, weights="pretrained"))  # which draws no values
    units = units_in(model, shape)
    blocks = units.blocks
    inside = {module for block in blocks for module in block.modules()}
    return Description(
        units.name,
        tuple(
            tuple(_described(name, module, i) for name, module in block.named_modules())
            for i, block in enumerate(blocks)
        ),
        tuple(_described(name, module) for name, module in model.named_modules() if module not in inside),
    )


def _described(name: str, module: nn.Module, index: int = -1) -> Hashable:
    plain = [
        (key, repr(value))
        for key, value in sorted(vars(module).items())
        if not key.startswith("_") and _is_plain(value) and not (key in _INDEX and value == index)
    ]
    tensors = [
        (key, tuple(tensor.shape), tensor.dtype)
        for of in (module._parameters, module._buffers)
        for key, tensor in of.items()
        if tensor is not None
    ]
    return name, type(module), module.extra_repr(), tuple(plain), tuple(tensors)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))


def layers_of(shape: HuggingFaceShape) -> Layers:
    """Return the layers, by what their modules are."""

    def keys(kept: Sequence[int]) -> dict[str, Any] | None:
        shorter = shape_with_layers(shape, kept)
        return None if shorter is None else {"path": shorter.path}

    return Layers(described(shape).layers, keys)


def shape_with_layers(shape: HuggingFaceShape, kept: Sequence[int]) -> HuggingFaceShape | None:
    """Return the shape of the same model with these layers alone, in the order of their numbers.

    In its config.json the number of layers is another one, and lists with an item for each layer have those items. A
    list of the numbers of all layers, such as that of all layers with experts, has the new numbers.
    None: the model of this config.json has other layers, or differs elsewhere.
    """
    whole = described(shape)
    if len(kept) == len(whole.layers):
        return shape
    settings = config_of(shape)
    values: dict[str, Any] = json.loads(settings.to_json_string(use_diff=False))
    for key, value in values.items():
        if isinstance(value, list) and len(value) == len(whole.layers):
            numbers = value == [*range(len(value))]
            values[key] = [*range(len(kept))] if numbers else [value[i] for i in kept]
    depth = settings.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if depth in values:
        values[depth] = len(kept)
    values["architectures"] = shape.config.get("architectures")
    shorter = replace(shape, path=str(_folder_with(json.dumps(values, sort_keys=True))))
    expected = Description(whole.blocks, tuple(whole.layers[i] for i in kept), whole.rest)
    return shorter if described(shorter) == expected else None


def _folder_with(content: str) -> Path:
    """Return a folder with this config.json, which stays until the process ends."""
    folder = Path(_root().name, hashlib.sha256(content.encode()).hexdigest()[:16])
    if not folder.exists():
        folder.mkdir()
        (folder / CONFIG).write_text(content, encoding="utf-8")
    return folder


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="shardwright-plan-")
