"""Edits of parameters between steps, which do the same to a plain model and to its sharded copy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import shardwright as sw


def multiply(model: Any) -> None:
    for p in model.parameters():
        p.mul_(0.9)


def multiply_together(model: Any) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.9)


def multiply_data(model: Any) -> None:
    for p in model.parameters():
        p.data.mul_(0.9)


def set_data(model: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.9


def write_elements(model: Any) -> None:
    model.head.weight[3] = 0.25
    model.embed.weight[1:4].mul_(0.5)
    model.blocks[1].up.bias.fill_(0.125)


def edit_whole(model: nn.Module) -> None:
    is_sharded = isinstance(model, sw.FSDPModule)
    with sw.unsharded(model) if is_sharded else nullcontext():
        for p in model.parameters():
            p.clamp_(-0.3, 0.3)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def write_state(model: nn.Module) -> None:
    for value in model.state_dict().values():
        value.mul_(0.9)


def freeze(model: Any) -> None:
    model.blocks[1].requires_grad_(False)


EDITS: dict[str, Callable[[Any], None]] = {
    "multiplied": multiply,
    "multiplied together": multiply_together,
    "data multiplied": multiply_data,
    "data set": set_data,
    "elements written": write_elements,
    "edited whole": edit_whole,
    "loaded": load,
    "state written": write_state,
    "frozen later": freeze,
}
