"""Inputs and outputs with something about them: no gradient, in-place changes, views, weights, auxiliary losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.engine.cases.base import DIM, Batch, Block, Case, Net, case, loss_of


@case("keyword-only inputs")
class Keywords(Case):
    class KeywordBlock(Block):
        def forward(self, *, hidden: torch.Tensor, scale: dict[str, Any]) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"hidden": super().forward(hidden) * scale["by"]}

    class Root(Net):
        def forward(self, *, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            for block in self.blocks:
                x = block(hidden=x, scale={"by": by})["hidden"]
            return self.head(x)

    def build(self) -> nn.Module:
        return self.Root(3, self.KeywordBlock)

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(x=batch.x, by=batch.randn(3, 1, slot=2))
        loss_of(y).backward()
        return y


@case("inputs that need no gradient", detach=True)
@case("integer inputs of inner units", detach=False)
class NoInputGradient(Case):
    """Nothing tells a unit that its backward is over when none of its inputs needs a gradient."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mix = nn.Embedding(11, DIM), nn.Linear(DIM, DIM)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.mix(self.table(ids))

    class Root(nn.Module):
        def __init__(self, detach: bool) -> None:
            super().__init__()
            self.detach = detach
            self.blocks = nn.ModuleList(NoInputGradient.Lookup() if not detach else Block() for _ in range(3))
            self.table, self.head = nn.Embedding(11, DIM), nn.Linear(DIM, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if not self.detach:
                return self.head(sum(block(ids) for block in self.blocks) + self.table(ids))  # type: ignore[operator]
            x = self.table(ids)
            y = torch.zeros_like(x)
            for block in self.blocks:
                y = y + block(x.detach())
            return self.head(y + x)

    def __init__(self, detach: bool) -> None:
        self.detach = detach

    def build(self) -> nn.Module:
        return self.Root(self.detach)

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.ids)
        loss_of(y).backward()
        return y


@case("an input needs a gradient on one rank only")
class InputGradientOnOneRank(Case):
    def train(self, model: Any, batch: Batch) -> Any:
        x = batch.x.requires_grad_(batch.rank == 0)
        y = model(x)
        loss_of(y).backward()
        return y


@case("in-place on a unit's output", "whole")
@case("in-place on a view of a unit's output", "view")
@case("in-place on a transposed view", "transposed")
@case("in-place on a view that a unit returned", "returned")
@case("in-place on a unit's input", "input")
@case("in-place on a unit's input, inside the unit", "inside")
class InPlace(Case):
    class ChangesInput(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(0.5))

    class ReturnsView(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([super().forward(x), x], dim=1)[:, :DIM]

    class Root(Net):
        kind = "whole"

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            for block in self.blocks:
                if self.kind in ("input", "inside"):
                    x = x * 1.0
                if self.kind == "input":
                    x.mul_(0.5)
                x = block(x)
                if self.kind == "whole":
                    x.mul_(0.5).add_(0.1)
                elif self.kind == "view":
                    x[:, 1:3].mul_(0.5)
                elif self.kind == "transposed":
                    x.t().tanh_()
                elif self.kind == "returned":
                    x.add_(0.25)
                    x[0].mul_(2.0)
            return self.head(x)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        blocks = {"returned": self.ReturnsView, "inside": self.ChangesInput}
        net = self.Root(3, blocks.get(self.kind, Block))
        net.kind = self.kind
        return net


@case("a unit that returns its input")
class Identity(Case):
    class Sometimes(Block):
        skip = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.skip else super().forward(x)

    def build(self) -> nn.Module:
        return Net(3, self.Sometimes)

    def edit(self, model: Any, step: int) -> None:
        for i, block in enumerate(model.blocks):
            block.skip = i == step


@case("a weight returned as output", "whole")
@case("a view of a weight returned as output", "view")
class WeightReturned(Case):
    class Returns(Block):
        kind = "whole"

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            weight = self.up.weight
            return super().forward(x), weight if self.kind == "whole" else weight.t()[1:3]

    class Root(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            penalty = torch.zeros((), dtype=x.dtype)
            for block in self.blocks:
                x, weight = block(x)
                penalty = penalty + weight.square().sum() * 0.1
            return self.head(x) + penalty

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        net = self.Root(2, self.Returns)
        for block in net.blocks:
            block.kind = self.kind
        return net


@case("auxiliary loss in an attribute", "tensor")
@case("auxiliary losses in a list attribute", "list")
@case("auxiliary loss in an attribute of an inner module", "inner")
class AuxiliaryLoss(Case):
    class Router(Block):
        kind = "tensor"

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(DIM, 3)
            self.holder = nn.Tanh()
            self.loss: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = torch.softmax(self.gate(x).float(), -1).square().mean()
            self.holder.loss = loss if self.kind == "inner" else None
            self.loss = loss if self.kind == "tensor" else {"aux": [loss]} if self.kind == "list" else None
            return super().forward(x)

        def taken(self) -> torch.Tensor:
            loss = (
                self.loss if self.kind == "tensor" else self.loss["aux"][0] if self.kind == "list" else None
            )
            loss = self.holder.loss if loss is None else loss
            self.loss = self.holder.loss = None
            return loss

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        net = Net(2, self.Router)
        for block in net.blocks:
            block.kind = self.kind
        return net

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x)
        aux = [block.taken() for block in model.blocks]
        # In one step the auxiliary losses are all there is.
        (sum(aux) + (loss_of(y) if batch.step != 1 else 0.0)).backward()
        return [y, *aux]
