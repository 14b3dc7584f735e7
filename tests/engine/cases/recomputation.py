"""Activation checkpointing around, inside and over units."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.engine.cases.base import Batch, Block, Case, Net, case, loss_of
from tests.engine.cases.failures import Boom, raising


class CheckpointedNet(Net):
    where, reentrant = "around", False

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.first(x)
        if self.where == "around":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        elif self.where == "around some":
            for i, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=self.reentrant) if i != 1 else block(x)
        elif self.where == "around two":
            x = checkpoint(lambda h: self.blocks[1](self.blocks[0](h)), x, use_reentrant=self.reentrant)
            x = self.blocks[2](x)
        elif self.where == "nested":
            x = checkpoint(self._nested, x, use_reentrant=self.reentrant)
            x = self.blocks[2](x)
        elif self.where == "twice":
            x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
            x = checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)
            x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(x)

    def _nested(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        return checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)


class CheckpointedBlock(Block):
    where, reentrant = "inside", False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where != "inside":
            return super().forward(x)
        hidden = checkpoint(lambda h: torch.tanh(self.up(h)), x, use_reentrant=self.reentrant)
        return x + torch.tanh(self.down(hidden))


class Checkpointed(Case):
    def __init__(self, where: str, reentrant: bool, inner_units: bool = False) -> None:
        self.where, self.reentrant, self.inner_units = where, reentrant, inner_units
        self.sums_differ_in_bf16 = where == "twice"

    def build(self) -> nn.Module:
        net = CheckpointedNet(3, CheckpointedBlock)
        for module in (net, *net.blocks):
            module.where, module.reentrant = self.where, self.reentrant
        return net

    def units(self, model: Any) -> list[Any]:
        inner = [m for b in model.blocks for m in (b.up, b.down)] if self.inner_units else []
        return [*inner, *model.blocks, model]


for _where, _reentrant in itertools.product(
    ("around", "around some", "around two", "nested", "twice", "inside"), (False, True)
):
    _mode = "reentrant" if _reentrant else "not reentrant"
    case(f"checkpoint {_where}, {_mode}", _where, _reentrant)(Checkpointed)
    if _where in ("around", "inside"):
        case(f"checkpoint {_where}, units inside units, {_mode}", _where, _reentrant, True)(Checkpointed)


@case("checkpoint around the whole root", False, False)
@case("checkpoint around the whole root, reentrant", True, False)
@case("checkpoint with retain_graph", False, True)
class CheckpointedRoot(Case):
    def __init__(self, reentrant: bool, retain: bool) -> None:
        self.reentrant, self.retain = reentrant, retain

    def train(self, model: Any, batch: Batch) -> Any:
        x = batch.x.requires_grad_(self.reentrant)
        loss = loss_of(checkpoint(model, x, use_reentrant=self.reentrant))
        if self.retain:
            loss.backward(retain_graph=True)
        loss.backward()
        return loss


@case("checkpoint, exception while recomputing", False)
@case("checkpoint, exception while recomputing, reentrant", True)
class RecomputationRaises(Checkpointed):
    def __init__(self, reentrant: bool) -> None:
        super().__init__("around", reentrant)

    def mishap(self, model: Any, batch: Batch) -> None:
        loss = loss_of(model(batch.x))
        handle = raising(model.blocks[1].down, "forward")
        with pytest.raises(Boom):
            loss.backward()
        handle.remove()
