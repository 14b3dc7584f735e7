"""Exceptions in forward, in backward, in evaluation and in the optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.cases.base import DIM, Batch, Case, Net, case, loss_of


class Boom(BaseException):
    """Not an Exception: what a user's Ctrl-C raises is none either."""


class Bomb:
    """A hook that raises once it is armed, the n-th time it is called."""

    def __init__(self, n: int = 1) -> None:
        self.left = n

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise Boom


def raising(module: nn.Module, where: str, n: int = 1) -> Any:
    bomb = Bomb(n)
    if where == "forward":
        return module.register_forward_pre_hook(bomb)
    if where == "after forward":
        return module.register_forward_hook(bomb)
    if where == "backward pre":
        return module.register_full_backward_pre_hook(bomb)
    return module.register_full_backward_hook(bomb)


PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "first block": lambda m: m.blocks[0],
    "inside the middle block": lambda m: m.blocks[1].down,
    "last block": lambda m: m.blocks[2],
    "root's own layer": lambda m: m.head,
    "root": lambda m: m,
}


class ForwardRaises(Case):
    """Goes on at once: nothing has to be cleared, as in plain torch."""

    def __init__(self, place: str, where: str) -> None:
        self.place, self.where = place, where

    def train(self, model: Any, batch: Batch) -> Any:
        handle = raising(PLACES[self.place](model), self.where)
        with pytest.raises(Boom):
            model(batch.randn(2, DIM, slot=1))
        handle.remove()
        return super().train(model, batch)


class BackwardRaises(Case):
    """Goes on after ``zero_grad``, as in plain torch, where a part of the gradients is there already."""

    def __init__(self, place: str, where: str) -> None:
        self.place, self.where = place, where

    def mishap(self, model: Any, batch: Batch) -> None:
        super().train(model, batch)
        handle = raising(PLACES[self.place](model), self.where)
        loss = loss_of(model(batch.randn(2, DIM, slot=1)))
        with pytest.raises(Boom):
            loss.backward()
        handle.remove()


for _place, _where in itertools.product(PLACES, ("forward", "after forward")):
    case(f"exception in forward: {_place}, {_where}", _place, _where)(ForwardRaises)
for _place, _where in itertools.product(PLACES, ("backward pre", "backward")):
    if (
        _place != "root" or _where == "backward pre"
    ):  # the root's input needs no gradient, so its hook never runs
        case(f"exception in backward: {_place}, {_where}", _place, _where)(BackwardRaises)


@case("exception in forward of an evaluation")
class EvaluationRaises(Case):
    def train(self, model: Any, batch: Batch) -> Any:
        handle = raising(model.blocks[1], "forward")
        with torch.no_grad(), pytest.raises(Boom):
            model(batch.x)
        handle.remove()
        with torch.no_grad():
            y = model(batch.x)
        return [y, super().train(model, batch)]


@case("exception between forward and backward")
class NeverBackward(Case):
    def mishap(self, model: Any, batch: Batch) -> None:
        with pytest.raises(Boom):
            loss_of(model(batch.x))
            raise Boom


@case("exception caught inside a unit's forward")
class Caught(Case):
    """The model itself catches what an inner unit raises, and goes another way."""

    class Root(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            for block in self.blocks:
                try:
                    x = block(x)
                except Boom:
                    x = torch.tanh(x)
            return self.head(x)

    def build(self) -> nn.Module:
        return self.Root()

    def train(self, model: Any, batch: Batch) -> Any:
        handle = raising(model.blocks[batch.step].down, "after forward")
        y = model(batch.x)
        handle.remove()
        loss_of(y).backward()
        return y


@case("exception in the optimizer")
class OptimizerRaises(Case):
    def update(self, optimizer: torch.optim.Optimizer, model: Any, step: int) -> None:
        handle = optimizer.register_step_pre_hook(Bomb())
        with pytest.raises(Boom):
            optimizer.step()
        handle.remove()
        optimizer.step()


@case("exception in the optimizer, given up")
class OptimizerGivenUp(Case):
    def update(self, optimizer: torch.optim.Optimizer, model: Any, step: int) -> None:
        handle = optimizer.register_step_pre_hook(Bomb(1 if step == 1 else 0))
        if step == 1:
            with pytest.raises(Boom):
                optimizer.step()
        else:
            optimizer.step()
        handle.remove()
