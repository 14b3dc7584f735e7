"""The model of a checkpoint: its state dict, and the section of a load that restores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from shardwright.checkpoint.format.nested import NestedState
from shardwright.checkpoint.load.checkpoints import Checkpoint
from shardwright.checkpoint.load.fit import check_shapes, check_values
from shardwright.checkpoint.training.optimizers import OPTIMIZER
from shardwright.checkpoint.training.section_to_load import SectionToLoad
from shardwright.engine import has_no_values, plain_name

MODEL = "model"


def model_state(model: nn.Module, frozen: bool) -> dict[str, Any]:
    """Return the state dict of a model, without parameters that need no gradient unless ``frozen``.

    Raises:
        ValueError: a tensor has no values, or a hook has given it another name.
    """
    try:
        state: dict[str, Any] = get_model_state_dict(model)
    except AttributeError:
        if renamed := _renamed(model):
            raise ValueError(
                f"the state dict of the model has {renamed[0]!r}, which is no parameter or buffer: a state-dict hook "
                "has renamed it, and torch's get_model_state_dict finds tensors by their names. Remove the hook while "
                "you save and load, or save model.state_dict() with shardwright.checkpoint.save_state"
            ) from None
        raise
    if not frozen:
        for name in _frozen_names(model):
            state.pop(name, None)
    for name, value in state.items():
        if isinstance(value, Tensor) and has_no_values(value):
            raise ValueError(without_values(name, "and no memory"))
    return state


def _renamed(model: nn.Module) -> list[str]:
    """Return the keys of the model's state dict that name no tensor and no extra state of its modules."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    names = {plain_name(name, model) for name, _ in tensors}
    keys = (plain_name(key, model) for key in model.state_dict())
    return [key for key in keys if key not in names and not key.endswith("_extra_state")]


def _frozen_names(model: nn.Module) -> set[str]:
    """Return every name of each parameter that needs no gradient, as in the plain model.

    Tied parameters have several.
    """
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name, model) for name, p in named if not p.requires_grad}


def without_values(name: str, what: str) -> str:
    return f"{name} has no values {what}, since the model is deferred or on meta. Call sw.materialize(model) first"


@dataclass(frozen=True)
class ModelToLoad(SectionToLoad):
    """The model of a load.

    Attributes:
        checkpoint, model, frozen: of the load.
        tensors: the state of the model.
    """

    key = MODEL
    checkpoint: Checkpoint
    model: nn.Module
    tensors: Mapping[str, Any]
    frozen: bool

    def check(self) -> None:
        tensors = NestedState.of(self.tensors).tensors
        check_shapes(self.checkpoint, MODEL, {name: each.shape for name, each in tensors.items()})
        check_values(self.checkpoint, MODEL, self.tensors)

    def restore(self, content: Mapping[str, Any]) -> None:
        values = {name: content.get(name, value) for name, value in self.tensors.items()}
        set_model_state_dict(self.model, values, options=StateDictOptions(strict=self.frozen))


def dtype_advice(name: str, dtype: torch.dtype) -> str:
    """Advice for a tensor of a run that is stored in another dtype."""
    if name.startswith(f"{OPTIMIZER}."):  # which torch makes in the gradients' dtype
        return "Use the precision policy of the save (grad_dtype), or load the model alone"
    return f"Make the model in {dtype}"
