"""Tensors of a state dict that ``load_state_dict`` of an optimizer neither casts nor moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Kept:
    """Wraps a tensor of a state dict: torch casts and moves tensors, and no other objects."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@contextmanager
def prepared(
    optimizer: torch.optim.Optimizer, prepare: Callable[[Any, dict[str, Any]], dict[str, Any]]
) -> Iterator[None]:
    """Inside, ``load_state_dict`` loads what ``prepare`` makes of a state dict, after all other hooks before a load."""
    handle = optimizer.register_load_state_dict_pre_hook(prepare)
    try:
        yield
    finally:
        handle.remove()
