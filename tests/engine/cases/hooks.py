"""The user's hooks on modules, registered before and after sharding, and on tensors."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn

from tests.engine.cases.base import Batch, Block, Case, Net, case, loss_of


class UserHooks(Case):
    def __init__(self, before: bool, kind: str) -> None:
        self.before, self.kind = before, kind

    def before_sharding(self, model: Any) -> None:
        if self.before:
            self.register(model)

    def after_sharding(self, model: Any) -> None:
        if not self.before:
            self.register(model)

    def clone(self, model: nn.Module) -> nn.Module:
        return copy.deepcopy(model)

    def register(self, model: Any) -> None:
        for module in (model.blocks[0], model.blocks[1].up, model.blocks[2], model.head, model):
            if self.kind == "forward pre":
                module.register_forward_pre_hook(halve_inputs)
            elif self.kind == "forward pre with kwargs":
                module.register_forward_pre_hook(halve_with_kwargs, with_kwargs=True)
            elif self.kind == "forward":
                module.register_forward_hook(double_output)
            elif self.kind == "forward, first":
                module.register_forward_hook(double_output, prepend=True)
            elif self.kind == "forward, reading weights":
                module.register_forward_hook(add_weight)
            elif self.kind == "forward pre, reading weights":
                module.register_forward_pre_hook(add_weight_before)
            elif self.kind == "backward":
                module.register_full_backward_hook(halve_gradients)
            elif self.kind == "backward pre":
                module.register_full_backward_pre_hook(halve_output_gradients)


def halve_inputs(module: nn.Module, args: Any) -> Any:
    return tuple(a * 0.5 for a in args)


def halve_with_kwargs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(a * 0.5 for a in args), kwargs


def double_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2.0


def add_weight(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + weight_sum(module).to(output.dtype)


def add_weight_before(module: nn.Module, args: Any) -> Any:
    return tuple(a + weight_sum(module).to(a.dtype) for a in args)


def weight_sum(module: nn.Module) -> torch.Tensor:
    """The sum of a weight of the module's own unit."""
    layer = module.up if isinstance(module, Block) else module.head if isinstance(module, Net) else module
    return layer.bias.sum() * 0.1


def halve_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in inputs)


def halve_output_gradients(module: nn.Module, outputs: Any) -> Any:
    return tuple(g * 0.5 for g in outputs)


for _before, _kind in itertools.product(
    (True, False),
    ("forward pre", "forward pre with kwargs", "forward", "forward, first", "backward", "backward pre"),
):
    case(f"hooks: {_kind}, {'before' if _before else 'after'} sharding", _before, _kind)(UserHooks)
case("hooks: forward, reading weights, before sharding", True, "forward, reading weights")(UserHooks)
case("hooks: forward pre, reading weights, after sharding", False, "forward pre, reading weights")(UserHooks)


@case("hooks on the output's gradient")
class TensorHooks(Case):
    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x)
        y.register_hook(lambda g: g * 0.5)
        y.retain_grad()
        loss_of(y).backward()
        return y, y.grad
