"""Building models of transformers from their configurations. transformers is imported when one is built.

Nothing here knows the trainer: `transformers_model` makes a model of the trainer of it.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.train.config.shapes.foreign import CONFIG, HuggingFaceShape
from shardwright.train.errors import UserError
from shardwright.train.models.foreign.units import Units, find_units

#: Models with an attention that sees later tokens, beside those for masked language modelling.
_NOT_CAUSAL = frozenset({"xlnet", "xlm", "xlm-prophetnet", "prophetnet", "cpmant"})


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """transformers imports torchao and others, which warn about parts that nobody here asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def imported_transformers() -> Any:
    """Return the module transformers.

    Raises:
        UserError: it is not installed, or too old.
    """
    try:
        import transformers
    except ImportError:
        raise UserError(
            "model.kind: 'hf' needs transformers, which is not installed; install the extra hf"
        ) from None
    major = int(transformers.__version__.partition(".")[0])
    if major < 5:
        raise UserError(
            f"model.kind: 'hf' needs transformers 5 or later, found {transformers.__version__}; install "
            "the extra hf again"
        )
    return transformers


def config_of(shape: HuggingFaceShape) -> Any:
    """Return the configuration of transformers for a shape.

    Raises:
        UserError: transformers has no causal language model of this type, or the values do not fit it.
    """
    imported_transformers()
    with _without_warnings():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        )

    values = _plain(shape.config)
    kind = values["model_type"]
    remote = values.pop("auto_map", None)
    if kind not in CONFIG_MAPPING:
        code = ""
        if remote:
            code = (
                f"; its code is in files of {shape.path} (trust_remote_code), and shardwright executes no code of "
                "models"
            )
        raise UserError(
            f"model.path: expected a model type that transformers has, found {kind!r} in the {CONFIG} of "
            f"{shape.path}{code}. Install a newer transformers, or set another model"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"model.path: expected a causal language model, found model type {kind!r} in {shape.path}, of which "
            "transformers has none; set another model"
        )
    sees_all = kind in _NOT_CAUSAL or (
        kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not values.get("is_decoder")
    )
    if sees_all:
        raise UserError(
            f"model.path: expected a causal language model, found {shape.path}, an encoder ({kind}): its tokens see "
            "the tokens that they shall predict; set another model"
        )
    try:
        with _without_warnings():
            return CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # of the checks of transformers, which have several classes
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.path: the {CONFIG} of {shape.path} is not one of a {kind}: {type(error).__name__}: {reason}"
        ) from error


def _plain(value: Any) -> Any:
    """Return a copy of what config.json says. transformers writes infinite numbers as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def build(shape: HuggingFaceShape) -> Any:
    """Return the model of a shape in float32, on the default device.

    Raises:
        UserError: transformers is not installed, or cannot build the model.
    """
    transformers = imported_transformers()
    config = config_of(shape)
    try:
        drawn = _no_random_weights() if shape.weights == "pretrained" else contextlib.nullcontext()
        with drawn, _without_warnings():
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
    except (ImportError, KeyError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.path: transformers cannot build the model of {shape.path}: {type(error).__name__}: {reason}"
        ) from error


_RANDOM = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_", "sparse_",
)  # fmt: skip


@contextlib.contextmanager
def _no_random_weights() -> Iterator[None]:
    """Random initialisers do nothing: files or a checkpoint replace their values. For 8 billion weights they take
    minutes on every rank, deferred or not. Constants and tables are computed as always."""
    from transformers import initialization

    def nothing(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    originals = [
        (module, name, getattr(module, name))
        for module in (nn.init, initialization)
        for name in _RANDOM
        if hasattr(module, name)
    ]
    for module, name, _ in originals:
        setattr(module, name, nothing)
    try:
        yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)


def units_in(model: Any, shape: HuggingFaceShape) -> Units:
    """Return the blocks and the head of a model that `build` has made."""
    return find_units(
        model,
        shape.blocks,
        frozenset(model._no_split_modules or ()),
        model.get_input_embeddings(),
        model.get_output_embeddings(),
    )
