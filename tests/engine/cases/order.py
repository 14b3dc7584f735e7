"""Units in changing order, skipped, repeated and without use, and several forwards or backwards in a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.engine.cases.base import DIM, Batch, Block, Case, Net, case, loss_of


@case("plain")
class Plain(Case):
    pass


@case("order changes between steps", lambda b: [(0, 1, 2), (2, 0, 1), (1, 2, 0)][b.step])
@case("order changes between micro-batches", lambda b: [(0, 1, 2), (2, 1, 0)][b.micro % 2])
@case("skipped in one micro-batch", lambda b: (0, 2) if b.micro == 1 or b.step == 1 else (0, 1, 2))
@case("skipped in the last micro-batch of a step", lambda b: (2,) if b.micro == b.micros - 1 else (0, 1, 2))
@case("skipped in a whole step", lambda b: (0, 1, 2) if b.step != 1 else (0,))
@case("skipped from the first step on", lambda b: (1, 2) if b.step < 2 else (2, 1, 0))
@case("called twice", lambda b: (0, 1, 0, 2))
@case("called twice in a row", lambda b: (0, 0, 1, 1, 2))
@case("called twice in some micro-batches", lambda b: (0, 1, 2, 1) if (b.step + b.micro) % 2 else (2, 1))
@case("no block at all", lambda b: () if b.step == 1 else (0, 1, 2))
class Path(Case):
    def __init__(self, path: Callable[[Batch], tuple[int, ...]]) -> None:
        self.path = path

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x, self.path(batch))
        loss_of(y).backward()
        return y


class Recursion(Block):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return self(x, depth - 1) if depth else x


class CallsAnother(Block):
    """Its forward runs the block it is given, perhaps itself, in its middle."""

    def forward(self, x: torch.Tensor, inner: nn.Module | None = None) -> torch.Tensor:
        x = torch.tanh(self.up(x))
        x = self.down(x)
        return x if inner is None else x + inner(x)


@case("recursive unit")
class Recursive(Case):
    def build(self) -> nn.Module:
        return Net(2, Recursion)


@case("unit called inside another's forward and on its own")
class Interleaved(Case):
    def build(self) -> nn.Module:
        return Scripted(Net(2, CallsAnother))

    def units(self, model: Any) -> list[Any]:
        return [*model.net.blocks, model]


class Scripted(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.net.blocks
        return self.net.head(two(one(self.net.first(x), inner=two), inner=one))


@case("recursive root")
class RecursiveRoot(Case):
    class Root(Net):
        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            y = super().forward(x)
            return y + self(torch.tanh(x), depth - 1) if depth else y

    def build(self) -> nn.Module:
        return self.Root()


@case("two forwards, one backward")
@case("two forwards, one backward, other orders", (2, 0, 1), (1,))
class TwoForwards(Case):
    def __init__(self, first: tuple[int, ...] | None = None, second: tuple[int, ...] | None = None) -> None:
        self.paths = first, second

    def train(self, model: Any, batch: Batch) -> Any:
        one = model(batch.x, self.paths[0])
        two = model(batch.randn(2, DIM, slot=1), self.paths[1])
        loss_of(one, two).backward()
        return one, two


@case("two forwards, two backwards, in order", (0, 1))
@case("two forwards, two backwards, reversed", (1, 0))
class TwoForwardsTwoBackwards(Case):
    sums_differ_in_bf16 = True

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order = order

    def train(self, model: Any, batch: Batch) -> Any:
        losses = [loss_of(model(batch.x)), loss_of(model(batch.randn(2, DIM, slot=1), (1, 0)))]
        for i in self.order:
            losses[i].backward()
        return losses


@case("a forward whose backward never runs")
class ForwardOnly(Case):
    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x)
        dropped = model(batch.randn(2, DIM, slot=1), (0, 2))
        loss_of(y).backward()
        return y, dropped


@case("backward twice by retain_graph")
class RetainGraph(Case):
    def train(self, model: Any, batch: Batch) -> Any:
        loss = loss_of(model(batch.x))
        loss.backward(retain_graph=True)
        loss.backward()
        return loss


@case("two losses of one graph")
class TwoLosses(Case):
    sums_differ_in_bf16 = True

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x)
        y[:, :2].float().square().mean().backward(retain_graph=True)
        y[:, 2:].float().tanh().mean().backward()
        return y


@case("gradients of inputs by autograd.grad")
class InputGradients(Case):
    """Penalties on gradients and saliency maps ask for the inputs' gradients only."""

    def train(self, model: Any, batch: Batch) -> Any:
        x = batch.x.requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model(x)), x)
        loss = loss_of(model(batch.randn(2, DIM, slot=1) + gradient[:2]))
        loss.backward()
        return gradient, loss


class Experts(nn.Module):
    """Three expert layers of which some are used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.never = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: torch.Tensor, which: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        for i in which:
            x = x + torch.tanh(self.experts[i](x))
        return x


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__(2, Experts)

    def forward(self, x: torch.Tensor, which: list[tuple[int, ...]]) -> torch.Tensor:  # type: ignore[override]
        x = self.first(x)
        for block, some in zip(self.blocks, which, strict=True):
            x = block(x, some)
        return self.head(x)


@case("unused on every rank", lambda b: [(0,), (2, 1)])
@case("unused on every rank, others in each step", lambda b: [(b.step % 3,), ((b.step + 1) % 3,)])
@case("unused on some ranks", lambda b: [(b.rank % 3,), (2, (b.rank + 1) % 2)])
@case("unused on some ranks, others in each micro-batch", lambda b: [((b.rank + b.micro) % 3,), (b.micro,)])
@case("whole unit unused on one rank", lambda b: [() if b.rank == b.step % 2 else (0, 1), (1,)])
@case("whole unit unused on every rank", lambda b: [(), (1, 2)])
class UnusedParameters(Case):
    def __init__(self, which: Callable[[Batch], list[tuple[int, ...]]]) -> None:
        self.which = which

    def build(self) -> nn.Module:
        return Mixture()

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x, self.which(batch))
        loss_of(y).backward()
        return y


@case("an output that no loss uses, on some ranks")
class UnusedOutput(Case):
    """Every unit runs forward everywhere, but backward does not reach the same ones."""

    class TwoHeads(Net):
        def __init__(self) -> None:
            super().__init__(2)
            self.other = nn.Linear(DIM, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            x = self.blocks[1](self.blocks[0](self.first(x)))
            return self.head(x), self.other(x)

    def build(self) -> nn.Module:
        return self.TwoHeads()

    def train(self, model: Any, batch: Batch) -> Any:
        y, z = model(batch.x)
        loss_of(*((y,) if batch.rank == 0 and batch.step != 1 else (y, z))).backward()
        return y, z
