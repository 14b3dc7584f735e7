"""The list of model kinds: what each offers, and no kind that silently gets what another has."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shardwright.train.config import ModelConfig
from shardwright.train.config.catalog import kinds
from shardwright.train.config.shapes.presets import PRESETS, LlamaConfig
from shardwright.train.errors import UserError
from shardwright.train.models import hugging_face, offers
from shardwright.train.models.build import model_of


@dataclass(frozen=True)
class Wider(LlamaConfig):
    """A model of somebody's own that differs from a Llama in what its shape does not show."""

    branches: int = 2


def test_a_kind_that_is_not_registered_is_an_error() -> None:
    shape = Wider(**vars(PRESETS["debug"]))
    for use in (
        hugging_face.key_map,
        hugging_face.config_json,
        offers.tensor_plan,
        lambda shape: offers.uneven(shape, 8, 2),
        model_of,
    ):
        with pytest.raises(
            TypeError, match=r"registered kind of model \(LlamaConfig, HybridConfig, .*\), found Wider"
        ):
            use(shape)


def test_every_registered_kind_offers_everything() -> None:
    for name in ("llama", "hybrid"):
        kind = kinds.kinds.get(name)
        assert kind.depth.removeprefix("model.") in kind.numbers
        if not kind.presets:
            assert offers.offers_of_kind(kind).check is not None
            with pytest.raises(
                ValueError, match=f"{kind.depth.removeprefix('model.')}: expected .*, found none"
            ):
                ModelConfig(kind=name)
            continue
        for preset, shape in kind.presets.items():
            assert type(shape) is kind.shape and ModelConfig(kind=name, preset=preset).shape() == shape
        shape = kind.presets["debug"]
        with torch.device("meta"):
            model = model_of(shape)
        assert model.config == shape
        names = {parameter for parameter, _ in model.named_parameters(remove_duplicate=False)}
        assert hugging_face.key_map(shape).keys() == names
        assert hugging_face.config_json(shape)["model_type"] in offers.offers_of_kind(kind).shapes
        assert offers.tensor_plan(shape) and offers.uneven(shape, 7, 2)


def test_a_key_of_another_kind_names_its_owners() -> None:
    with pytest.raises(
        ValueError, match="head_dim: kind 'llama' has none; expected it with kind 'hybrid' only"
    ):
        ModelConfig(head_dim=8)
    with pytest.raises(
        ValueError, match="n_layers: kind 'hybrid' has none; expected it with kind 'llama' only"
    ):
        ModelConfig(kind="hybrid", n_layers=2)
    with pytest.raises(
        UserError, match="expected model_type llama, nemotron_h or shardwright_hybrid, found 'gpt2'"
    ):
        hugging_face.shape_of({"model_type": "gpt2"})
