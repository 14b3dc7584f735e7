"""Weights that the user changes by hand: between steps and micro-batches, in evaluation, inside forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwright as sw
from tests.engine.cases.base import DIM, FP32, HIDDEN, Batch, Block, Case, Net, case


def edit_in_place(model: Any) -> None:
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(1.1)
        model.blocks[1].up.bias.add_(0.1)
        model.head.weight.sub_(0.05)


def edit_copy(model: Any) -> None:
    with torch.no_grad():
        for p in (model.blocks[0].down.weight, model.first.bias):
            p.copy_(p * 0.5 + 0.1)


def edit_foreach(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


def edit_data(model: Any) -> None:
    model.blocks[0].up.weight.data.mul_(1.1)
    model.head.bias.data.add_(0.1)


def edit_data_kept(model: Any) -> None:
    """Edits through an alias that was taken long before."""
    kept = model.__dict__.setdefault("kept", [model.blocks[1].up.weight.data, model.first.weight.detach()])
    for tensor in kept:
        tensor.mul_(0.9)


def edit_data_set(model: Any) -> None:
    for p in (model.blocks[2].up.weight, model.head.bias):
        p.data = p.data * 1.1


def edit_data_whole(model: Any) -> None:
    """A whole tensor, the same on every rank, as a user gives who knows of no shards."""
    for name, p in dict(model.named_parameters()).items():
        if name.endswith("up.weight"):
            p.data = torch.linspace(-0.5, 0.5, p.numel()).view(p.shape)


def edit_init(model: Any) -> None:
    nn.init.constant_(model.blocks[1].up.bias, 0.2)
    nn.init.zeros_(model.first.bias)
    nn.init.ones_(model.head.bias)


def edit_parameter(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.linspace(-1, 1, 4 * DIM).view(4, DIM))
    model.blocks[0].up.bias = nn.Parameter(torch.linspace(0, 1, HIDDEN))


def edit_grow(model: Any) -> None:
    """A parameter of another shape: the vocabulary or the number of classes was changed."""
    rows = model.head.bias.shape[0] + 1
    model.head.weight = nn.Parameter(torch.linspace(-1, 1, rows * DIM).view(rows, DIM))
    model.head.bias = nn.Parameter(torch.linspace(0, 1, rows))


def edit_remove(model: Any) -> None:
    model.head.bias = None
    model.blocks[0].up.bias = None


def edit_add(model: Any) -> None:
    if model.blocks[0].down.bias is None:
        model.blocks[0].down.bias = nn.Parameter(torch.linspace(-1, 1, DIM))


class HandEdit(Case):
    def __init__(self, edit: Callable[[Any], None], steps: tuple[int, ...], rebuild: bool = False) -> None:
        self.what, self.at, self.rebuild_optimizer = edit, steps, rebuild

    def edit(self, model: Any, step: int) -> None:
        if step in self.at:
            self.what(model)


for _edit in (edit_in_place, edit_copy, edit_foreach, edit_data, edit_data_set, edit_data_whole, edit_init):
    case(f"by hand: {_edit.__name__[5:]}", _edit, (0, 1, 2))(HandEdit)
case("by hand: data alias kept", edit_data_kept, (0, 1, 2))(HandEdit)
for _edit in (edit_parameter, edit_grow, edit_remove, edit_add):
    case(f"by hand: {_edit.__name__[5:]} before the first forward", _edit, (0,), True)(HandEdit)
    case(f"by hand: {_edit.__name__[5:]} between steps", _edit, (1,), True)(HandEdit)


@case("by hand: between micro-batches", edit_in_place)
@case("by hand: .data between micro-batches", edit_data)
@case("by hand: .data set between micro-batches", edit_data_set)
class EditBetween(Case):
    def __init__(self, edit: Callable[[Any], None]) -> None:
        self.what = edit

    def between(self, model: Any, step: int, micro: int) -> None:
        if micro:
            self.what(model)


@case("by hand: during evaluation", edit_in_place)
@case("by hand: .data during evaluation", edit_data)
class EditDuringEvaluation(Case):
    """Two evaluations with an edit between them: a slab kept from the first is stale."""

    precisions = ("fp32",)  # edits of a bfloat16 copy round

    def __init__(self, edit: Callable[[Any], None]) -> None:
        self.what = edit

    def edit(self, model: Any, step: int) -> None:
        x = Batch(step, 8, 1, 0, 1, FP32).x
        seen = []
        with torch.no_grad():
            seen.append(model(x))
            self.what(model)
            seen.append(model(x))
        model.__dict__.setdefault("seen", []).append(seen)

    def train(self, model: Any, batch: Batch) -> Any:
        return [*model.__dict__["seen"][-1], super().train(model, batch)]


def clamp(weight: Any) -> None:
    with torch.no_grad():
        weight.clamp_(-0.3, 0.3)


def clamp_data(weight: Any) -> None:
    weight.data.clamp_(-0.3, 0.3)


def set_clamped_data(weight: Any) -> None:
    weight.data = weight.data.clamp(-0.3, 0.3)


@case("weights edited inside forward", clamp)
@case("weights edited inside forward: .data in place", clamp_data)
@case("weights edited inside forward: .data set", set_clamped_data)
class EditedInForward(Case):
    """As codebooks with moving averages, spectral normalisation by hand and constraints on weights do."""

    class Clamping(Block):
        clamp: Callable[[Any], None]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).clamp(self.up.weight)
            return super().forward(x)

    precisions = ("fp32",)  # under bfloat16 the edit is that of a rounded copy

    def __init__(self, how: Callable[[Any], None]) -> None:
        self.block = type("Clamping", (self.Clamping,), {"clamp": staticmethod(how)})

    def build(self) -> nn.Module:
        return Net(2, self.block)

    def clone(self, model: nn.Module) -> nn.Module:
        return copy.deepcopy(model)

    def edit(self, model: Any, step: int) -> None:
        if not isinstance(model, sw.FSDPModule):  # the copies that compute clamp their own weights
            for block in model.blocks:
                clamp(block.up.weight)
