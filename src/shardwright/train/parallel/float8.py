"""Matrix products of blocks in float8, by torchao: where they can be had, which layers, and what a step needs.

torchao is imported only where `[train] float8` asks for it. `config/conflicts` has the settings that
do not go together with it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.train.config.values import BuildSettings
from shardwright.train.errors import UserError
from shardwright.train.models.language_model import LanguageModel

CAPABILITY = (8, 9)  #: from which on GPUs multiply in float8
MULTIPLE = 16  #: of which every size of such a product is one


def check_float8(recipe: str, kind: str) -> None:
    """Raise if torchao is missing or the device does not multiply in float8."""
    if recipe == "none":
        return
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            f"train.float8: {recipe!r} needs torchao, found none; install the extra float8, or set it "
            "to 'none'"
        )
    device = "the CPU"
    if kind == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability >= CAPABILITY:
            return
        device = f"{torch.cuda.get_device_name()} of capability {'.'.join(map(str, capability))}"
    raise UserError(
        f"train.float8: expected a GPU of capability {'.'.join(map(str, CAPABILITY))} or more (Ada, Hopper, "
        f"Blackwell), found {device}; set it to 'none'"
    )


def convert(model: LanguageModel, settings: BuildSettings) -> None:
    """Let the linear layers of blocks multiply in float8, but for those that choose experts. Before anything is cut.

    Raises UserError for a layer with a size that float8 cannot have.
    """
    if settings.float8 == "none":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(settings.float8),
        enable_fsdp_float8_all_gather=settings.gathers_float8,
    )

    def is_converted(layer: nn.Module, name: str) -> bool:
        if not isinstance(layer, nn.Linear) or _chooses_experts(name):
            return False
        rows, columns = layer.weight.shape
        if rows % MULTIPLE or columns % MULTIPLE:
            raise UserError(
                f"train.float8: expected sizes that are multiples of {MULTIPLE}, found {rows} x {columns} of "
                f"{name!r}; set it to 'none', or choose other sizes in [model]"
            )
        return True

    for block in model.blocks():
        convert_to_float8_training(block, module_filter_fn=is_converted, config=recipe)
        for name, layer in block.named_modules():
            if settings.gathers_float8 and is_converted(layer, name):
                layer.register_state_dict_post_hook(_put_plain_weight)


def _chooses_experts(name: str) -> bool:
    """Return whether a layer of that name gives the scores of experts: near ties must not fall by rounding."""
    return not {"router", "gate"}.isdisjoint(name.split("."))


def _put_plain_weight(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Checkpoints have weights as they are stored, to be read without torchao; the memory is the parameter's."""
    weight = state.get(prefix + "weight")
    if isinstance(weight, DTensor):
        plain = weight.to_local()._tensor  # type: ignore[attr-defined]
        state[prefix + "weight"] = DTensor.from_local(
            plain,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )


def prepare_scales(model: nn.Module) -> None:
    """Compute the scales of weights that are gathered in float8 by one all-reduce, not one each in their gathers.

    Called after the weights have changed.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
