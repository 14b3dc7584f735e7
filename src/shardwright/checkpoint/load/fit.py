"""Whether a checkpoint fits the state that it is to be read into: names, shapes and dtypes.

Each function raises one error, for the first entry that does not fit. Nothing here reads tensors or communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.format.nested import StateTensor
from shardwright.checkpoint.load.checkpoints import Checkpoint, StoredForm


def check_tensors(
    checkpoint: Checkpoint,
    tensors: Mapping[str, StateTensor],
    convert: bool = False,
    advice: Callable[[str, torch.dtype], str] = lambda name, dtype: f"Make it in {dtype}",
) -> None:
    """Raise ValueError for the first tensor that the checkpoint does not have in this shape and, unless values may be
    converted, in this dtype. ``advice`` ends the error for a tensor of this name that is stored in this other dtype."""
    path = checkpoint.place
    for name, each in tensors.items():
        form = checkpoint.tensors.get(name)
        if form is None:
            raise ValueError(f"{path} has no tensor {name}, so it is of another model or state")
        if form.shape != each.shape:
            raise ValueError(f"{path}: {name} has shape {list(form.shape)}, expected {list(each.shape)}")
        if form.dtype != each.dtype and not convert:
            raise ValueError(
                f"{path}: {name} has dtype {form.dtype}, expected {each.dtype}. {advice(name, form.dtype)}"
            )


def check_values(checkpoint: Checkpoint, key: str, state: Mapping[str, Any]) -> None:
    """Raise ValueError unless the checkpoint has the values of ``state`` below ``key``, and no others."""
    for name, value in state.items():
        if not isinstance(value, Tensor) and not checkpoint.has(f"{key}.{name}"):
            raise ValueError(f"{checkpoint.place} has no value {key}.{name}")
    if checkpoint.has_pickled_values:
        return  # they are read later
    for name, leaf in checkpoint.below(key).items():
        is_own = any(name == own or name.startswith(f"{own}.") for own in state)
        if not isinstance(leaf, StoredForm) and not is_own:
            raise ValueError(f"{checkpoint.place} has the value {key}.{name}, which this {key} does not have")


def check_shapes(checkpoint: Checkpoint, key: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless the tensors below ``key`` have these names and shapes. Names the first that differs."""
    forms = {name: form for name, form in checkpoint.below(key).items() if isinstance(form, StoredForm)}
    for name in (*shapes, *forms):
        expected, found = shapes.get(name), forms[name].shape if name in forms else None
        if expected == found:
            continue
        if expected is None:
            text = f"no tensor {name}, found one of shape {list(found or ())}"
        else:
            text = f"{name} of shape {list(expected)}, found {'no such tensor' if found is None else list(found)}"
        raise ValueError(f"{checkpoint.place}: expected {text}; this is a checkpoint of another {key}")
