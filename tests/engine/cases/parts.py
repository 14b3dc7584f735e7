"""Children, layers and stages that are called on their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.engine.cases.base import DIM, Batch, Case, Net, case, loss_of


@case("a child called before the root", True)
@case("a child called without the root in one step", False)
class ChildAlone(Case):
    sums_differ_in_bf16 = True

    def __init__(self, root_too: bool) -> None:
        self.root_too = root_too

    def train(self, model: Any, batch: Batch) -> Any:
        y = model.blocks[1](batch.x)
        loss_of(y).backward()
        if not self.root_too and batch.step != 1:
            return y
        return [y, super().train(model, batch)]


@case("the root's own layer called without the root")
class LayerAlone(Case):
    """``head`` is no unit: plain FSDP can only refuse this, unless it is a unit as here."""

    def units(self, model: Any) -> list[Any]:
        return [model.head, *super().units(model)]

    def train(self, model: Any, batch: Batch) -> Any:
        y = model.head(torch.tanh(model.blocks[0](batch.x)))
        loss_of(y).backward()
        return y


@case("children called one by one from outside")
class PipelineByHand(Case):
    def units(self, model: Any) -> list[Any]:
        return [model.first, *model.blocks, model.head, model]

    def train(self, model: Any, batch: Batch) -> Any:
        x = model.first(batch.x)
        for i in [(0, 1, 2), (2, 1), (1, 0)][batch.step]:
            x = model.blocks[i](x)
        y = model.head(x)
        loss_of(y).backward()
        return y


@case("units without a common root")
class NoRoot(PipelineByHand):
    def units(self, model: Any) -> list[Any]:
        return [model.first, *model.blocks, model.head]


@case("a list unit of which forward runs a part")
class ChunkedLoss(Case):
    class Root(Net):
        def __init__(self) -> None:
            super().__init__(2)
            self.norm, self.spare = nn.LayerNorm(DIM), nn.Linear(DIM, 4)

        def forward(self, x: torch.Tensor, chunks: int) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            if chunks == 0:
                return self.head(x)
            x = self.norm(x)
            return sum((loss_of(self.head(part)) for part in x.chunk(chunks)), torch.zeros(()))

    def build(self) -> nn.Module:
        return self.Root()

    def units(self, model: Any) -> list[Any]:
        return [*model.blocks, [model.norm, model.head, model.spare], model]

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.randn(6, DIM), [3, 0, 1][batch.step])
        loss_of(y).backward()
        return y


@case("chunked loss outside the root")
class ChunkedOutside(ChunkedLoss):
    def train(self, model: Any, batch: Batch) -> Any:
        hidden: list[torch.Tensor] = []
        handle = model.blocks[1].register_forward_hook(lambda m, a, o: hidden.append(o))
        y = model(batch.randn(6, DIM), 2)
        handle.remove()
        losses = [loss_of(model.head(part)) for part in hidden[0].chunk(3)]
        (sum(losses) + loss_of(y)).backward()
        return [y, *losses]
