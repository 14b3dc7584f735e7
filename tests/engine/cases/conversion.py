"""Conversions, copies and state dicts between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.engine.cases.base import DIM, FP32, FP64, Batch, Case, case, loss_of


def to_double(model: Any, step: int) -> None:
    if step == 1:
        model.to(FP64)
    elif step == 2:
        model.float()


def half_and_back(model: Any, step: int) -> None:
    model.half()
    model.float()


def child_to_double_and_back(model: Any, step: int) -> None:
    model.blocks[1].double()
    model.blocks[1].up.float()
    model.blocks[1].float()


def scaled_by_apply(model: Any, step: int) -> None:
    model._apply(lambda t: t * 0.9)


def child_scaled_by_apply(model: Any, step: int) -> None:
    model.blocks[step]._apply(lambda t: t * 0.9)
    model.head._apply(lambda t: t * 1.1)


def emptied(model: Any, step: int) -> None:
    model.to_empty(device="cpu")
    model.load_state_dict(state_of(model, step))


def state_of(model: Any, step: int) -> dict[str, torch.Tensor]:
    """Whole tensors, the same on every rank, for every name."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(value.shape, generator=generator) / 3 for name, value in model.state_dict().items()
    }


@case("converted: .half() and back", half_and_back)
@case("converted: a child to double and back", child_to_double_and_back)
@case("converted: _apply", scaled_by_apply)
@case("converted: _apply on children", child_scaled_by_apply)
@case("converted: to_empty and loaded", emptied)
class Converted(Case):
    def __init__(self, convert: Callable[[Any, int], None]) -> None:
        self.convert = convert

    def edit(self, model: Any, step: int) -> None:
        self.convert(model, step)


@case("converted: to double and back to float")
class Doubled(Converted):
    precisions = ("fp32",)
    rebuild_optimizer = True

    def __init__(self) -> None:
        super().__init__(to_double)

    def train(self, model: Any, batch: Batch) -> Any:
        x = batch.x.to(FP64 if batch.step == 1 else FP32)
        y = model(x)
        y.square().mean().backward()
        return y


@case("deepcopy, going on with the copy")
class DeepCopied(Case):
    rebuild_optimizer = True

    def edit(self, model: Any, step: int) -> nn.Module:
        if step == 1:  # after use: hooks, gradients and order are there
            with torch.no_grad():
                model(torch.ones(2, DIM))
        return copy.deepcopy(model)


@case("deepcopy, going on with the original")
class CopiedFrom(Case):
    """The copy trains, too, and must not be seen in the original."""

    def edit(self, model: Any, step: int) -> None:
        twin = copy.deepcopy(model)
        loss_of(twin(torch.ones(2, DIM))).backward()
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2.0)


def loaded(model: Any, step: int) -> None:
    model.load_state_dict(state_of(model, step))


def loaded_assigned(model: Any, step: int) -> None:
    model.load_state_dict(state_of(model, step), assign=True)


def loaded_in_part(model: Any, step: int) -> None:
    state = {k: v for k, v in state_of(model, step).items() if "blocks.1" in k}
    model.load_state_dict(state, strict=False)
    model.load_state_dict({"unknown": torch.ones(1)}, strict=False)


def loaded_own(model: Any, step: int) -> None:
    """Remember and go back, as early stopping does."""
    if step == 1:
        model.__dict__["best"] = {k: v.clone() for k, v in model.state_dict().items()}
    elif step == 2:
        model.load_state_dict(model.__dict__["best"])


def loaded_own_assigned(model: Any, step: int) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def loaded_child(model: Any, step: int) -> None:
    model.blocks[1].load_state_dict(state_of(model.blocks[1], step))
    model.head.load_state_dict(state_of(model.head, step))


@case("state dict: loaded", loaded)
@case("state dict: assigned", loaded_assigned, True)
@case("state dict: loaded in part", loaded_in_part)
@case("state dict: own, loaded later", loaded_own)
@case("state dict: own, assigned", loaded_own_assigned, True)
@case("state dict: of a child", loaded_child)
class StateDict(Case):
    def __init__(self, load: Callable[[Any, int], None], rebuild: bool = False) -> None:
        self.load, self.rebuild_optimizer = load, rebuild

    def edit(self, model: Any, step: int) -> None:
        self.load(model, step)
