"""The start of a run with adapters: which adapters it begins with, and whether the base is the one they belong to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.checkpoint import KeyMap
from shardwright.engine import RankGroup
from shardwright.train.config import FinetuneConfig
from shardwright.train.config.shapes.presets import Shape
from shardwright.train.config.values import BuildSettings
from shardwright.train.errors import UserError
from shardwright.train.finetune.adapters import reset_magnitudes, uncalled_layers
from shardwright.train.finetune.base import base_of, check_same_base, write_base
from shardwright.train.finetune.peft_files import read_adapters
from shardwright.train.finetune.selection import (
    layers_to_adapt,
    parameters_to_freeze,
    parameters_to_train,
)
from shardwright.train.models.build import model_of
from shardwright.train.models.foreign.module import module_names
from shardwright.train.models.hugging_face import key_map
from shardwright.train.models.offers import offers_of


def check_fits(settings: FinetuneConfig, shape: Any) -> None:
    """Raise if the patterns or the rank of `[finetune]` do not fit the model of this shape.

    The model is made without memory to look. Models of users are made by ranks alone, and are looked at there.

    Raises:
        UserError: as `layers_to_adapt`, `parameters_to_train` and `parameters_to_freeze`.
    """
    if offers_of(shape).layers is None or not (
        settings.has_adapters or settings.freeze or settings.train_only
    ):
        return
    with torch.device("meta"):
        model = model_of(replace(shape, weights="pretrained") if hasattr(shape, "weights") else shape)
    if settings.has_adapters:
        layers_to_adapt(model, settings)
        parameters_to_train(model, settings)
    else:
        parameters_to_freeze(model, settings)


def peft_names(model: nn.Module, shape: Shape) -> KeyMap | None:
    """Return the names of the base's tensors in the module that peft wraps: transformers', or the user's own."""
    names = module_names(model)
    return key_map(shape) if names is None and offers_of(shape).key_map is not None else names


def prepare(
    plain: nn.Module, settings: BuildSettings, base_file: Path, resume: bool, mesh: DeviceMesh
) -> None:
    """Compare the base with the run's reference, or write this reference. Called by every rank of `mesh`.

    `plain` is the model without the wrapper of an engine. A new run also reads the adapters to start from. Raises
    UserError on every rank.
    """
    ranks = RankGroup.of_mesh(mesh)
    if not resume:
        reset_magnitudes(plain)
    base = base_of(plain, settings.source)
    if resume:
        ranks.run_own(lambda: check_same_base(base_file, base), others_raise=UserError)
        return
    finetune = settings.finetune
    if finetune.adapters:
        names = peft_names(plain, settings.model.shape())
        ranks.run_own(
            lambda: read_adapters(plain, finetune.adapters, finetune, key_map=names), others_raise=UserError
        )
    ranks.run_own(lambda: write_base(base_file, base) if ranks.is_first else None, others_raise=UserError)


def check_called(model: nn.Module) -> None:
    """Refuse adapters on layers whose weights the model uses without calling the layers. After an eager step."""
    if names := uncalled_layers(model):
        raise UserError(
            f"finetune.targets: expected layers that the model calls, found {names[0]!r}, whose weight it uses "
            f"directly ({len(names)} such layers); an adapter there changes nothing. Leave these layers out"
        )
