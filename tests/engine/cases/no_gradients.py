"""Models and parts of models that take no gradients: evaluation, parts of a forward, frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.engine.cases.base import DIM, FP32, Batch, Case, Net, case, loss_of


@case("evaluation twice in a row", torch.no_grad, False)
@case("evaluation in inference mode", torch.inference_mode, False)
@case("evaluation between forward and backward", torch.no_grad, True)
@case("inference between forward and backward", torch.inference_mode, True)
class Evaluation(Case):
    def __init__(self, mode: Callable[[], Any], inside: bool) -> None:
        self.mode, self.inside = mode, inside

    def train(self, model: Any, batch: Batch) -> Any:
        loss = loss_of(model(batch.x)) if self.inside else None
        model.eval()
        with self.mode():
            y = model(batch.randn(2, DIM, slot=1))
            z = model(batch.randn(2, DIM, slot=2), (2, 0))
        model.train()
        loss = loss_of(model(batch.x)) if loss is None else loss
        loss.backward()
        return y, z, loss


@case("evaluation after the optimizer")
class EvaluationAfterUpdate(Case):
    """A kept slab must not be taken for the new weights."""

    precisions = ("fp32",)  # the plain model between steps computes in float32

    def update(self, optimizer: torch.optim.Optimizer, model: Any, step: int) -> Any:
        x = Batch(step, 8, 1, 0, 1, FP32).x
        with torch.no_grad():
            before = model(x)
            optimizer.step()
            return before, model(x)


class Twice(Net):
    """Blocks run without gradients first, as for a target network or a warm start of a fixed point."""

    kind = "before"

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.first(x)
        if self.kind == "one block":
            with torch.no_grad():
                x = self.blocks[0](x)
            x = self.blocks[1](x)
            return self.head(x)
        if self.kind == "before":
            with torch.no_grad():
                start = x
                for block in self.blocks:
                    start = block(start)
            x = x + start
        for block in self.blocks:
            x = block(x)
        if self.kind == "after":
            with torch.no_grad():
                extra = self.blocks[0](x)
            x = x + extra
        return self.head(x)


@case("a block under no_grad only", "one block")
@case("blocks under no_grad, then with gradients", "before")
@case("a block with gradients, then under no_grad", "after")
class PartsWithoutGrad(Case):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        net = Twice()
        net.kind = self.kind
        return net


@case("frozen prefix", lambda m, s: (m.first, m.blocks[0]))
@case("frozen middle block", lambda m, s: (m.blocks[1],))
@case("frozen suffix", lambda m, s: (m.blocks[2], m.head))
@case("frozen parts of every unit", lambda m, s: [b.up for b in m.blocks])
@case("frozen biases", lambda m, s: [m.first.bias, m.head.bias, *(b.up.bias for b in m.blocks)])
@case("frozen but the head", lambda m, s: (m.first, *m.blocks))
@case("gradual unfreezing", lambda m, s: m.blocks[: 2 - s])
@case("gradual freezing", lambda m, s: m.blocks[:s])
@case("frozen in one step", lambda m, s: m.blocks if s == 1 else ())
@case("another block frozen in each step", lambda m, s: (m.blocks[s],))
class Frozen(Case):
    def __init__(self, which: Callable[[Any, int], Any]) -> None:
        self.which = which

    def before_sharding(self, model: Any) -> None:
        self.edit(model, 0)

    def edit(self, model: Any, step: int) -> None:
        model.requires_grad_(True)
        for each in self.which(model, step):
            each.requires_grad_(False)


@case("frozen between micro-batches", 1)
@case("unfrozen between micro-batches", 0)
class FrozenBetween(Case):
    def __init__(self, frozen_in: int) -> None:
        self.frozen_in = frozen_in

    def between(self, model: Any, step: int, micro: int) -> None:
        for module in (model.blocks[step], model.first):
            module.requires_grad_(micro != self.frozen_in)


@case("frozen between forward and backward")
class FrozenBeforeBackward(Case):
    """AccumulateGrad looks at requires_grad when it runs, so these get no gradient."""

    def train(self, model: Any, batch: Batch) -> Any:
        loss = loss_of(model(batch.x))
        model.blocks[1].up.requires_grad_(False)
        loss.backward()
        model.blocks[1].up.requires_grad_(True)
        return loss


@case("LoRA")
class Lora(Case):
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(DIM, DIM).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, DIM) / 3), nn.Parameter(torch.randn(DIM, 2) / 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.base(x) + x @ self.a.t() @ self.b.t())

    def build(self) -> nn.Module:
        return Net(3, self.Adapted)
