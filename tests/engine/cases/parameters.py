"""Kinds of parameters and of layers: odd shapes, dtypes, parametrizations, attention, dropout, batch norm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.engine.cases.base import BF16, CASES, DIM, FP64, Batch, Block, Case, Net, case, loss_of


class Odd(nn.Module):
    """Parameters of unusual sizes and layouts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "few rows":
            self.one, self.two = nn.Linear(DIM, 1), nn.Linear(1, DIM, bias=False)
            self.row = nn.Parameter(torch.randn(1, DIM))
        elif kind == "0-d":
            self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.1))
            self.frozen = nn.Parameter(torch.tensor(0.9), requires_grad=False)
        elif kind == "only 0-d":
            self.scale = nn.Parameter(torch.tensor(0.7))
        elif kind == "non-contiguous":
            self.weight = nn.Parameter(torch.randn(DIM, DIM).t() / 3)
            self.strided = nn.Parameter(torch.randn(DIM, 2 * DIM)[:, ::2] / 3)
        elif kind == "channels-last":
            self.conv = nn.Conv2d(2, 3, 2, padding=1).to(memory_format=torch.channels_last)
        elif kind == "empty":
            self.nothing, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(DIM))
        elif kind == "expanded":
            self.weight = nn.Parameter(torch.randn(1, DIM).expand(DIM, DIM).clone() / 3)
        elif kind == "three dimensions":
            self.weight = nn.Parameter(torch.randn(2, 3, DIM) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "few rows":
            return x + torch.tanh(self.two(torch.tanh(self.one(x))) + self.row)
        if self.kind == "0-d":
            return torch.tanh(x * self.scale * self.frozen + self.shift)
        if self.kind == "only 0-d":
            return torch.tanh(x) * self.scale
        if self.kind == "non-contiguous":
            return torch.tanh(x @ self.weight + x @ self.strided)
        if self.kind == "channels-last":
            image = x.reshape(-1, 2, 1, 3).contiguous(memory_format=torch.channels_last)
            return torch.tanh(self.conv(image))[:, :2, :1, :3].reshape(-1, DIM)
        if self.kind == "empty":
            return torch.tanh(x * self.scale + self.nothing.sum())
        if self.kind == "three dimensions":
            return torch.tanh(x + torch.einsum("bd,ijd->bij", x, self.weight).reshape(-1, DIM))
        return torch.tanh(x @ self.weight)


class OddCase(Case):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        return Net(2, lambda: Odd(self.kind))


for _kind in (
    "few rows",
    "0-d",
    "only 0-d",
    "non-contiguous",
    "channels-last",
    "empty",
    "expanded",
    "three dimensions",
):
    case(f"parameters: {_kind}", _kind)(OddCase)


@case("mixed dtypes in one unit")
class MixedDtypes(Case):
    """Under a policy all of them compute in bfloat16; without one each computes in its own dtype."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single = nn.Linear(DIM, DIM)
            self.wide = nn.Linear(DIM, DIM, dtype=FP64)
            self.brain = nn.Linear(DIM, DIM, dtype=BF16)
            self.steps = nn.Parameter(torch.arange(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.single(x))
            y = torch.tanh(self.wide(y.to(self.wide.weight.dtype)))
            y = torch.tanh(self.brain(y.to(self.brain.weight.dtype)))
            return y.to(x.dtype) + self.steps.sum() * 0.1

    precisions = ("fp32",)

    def build(self) -> nn.Module:
        return Net(2, self.Mixed)


class Square(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w + w.square() * 0.5

    def right_inverse(self, w: torch.Tensor) -> torch.Tensor:
        return w


class Tanh(nn.Module):
    """Without an inverse, so that the values change when it is registered."""

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(w)


class Parametrized(Case):
    def __init__(self, kind: str, whole: bool) -> None:
        self.kind, self.whole = kind, whole
        if "spectral" in kind:
            self.precisions = (
                "fp32",
            )  # its buffers keep their dtype, and torch multiplies them by the weight

    def build(self) -> nn.Module:
        net = Net(2)
        for block in net.blocks:
            if self.kind == "custom":
                parametrize.register_parametrization(block.up, "weight", Square())
                parametrize.register_parametrization(block.up, "weight", Square())
                parametrize.register_parametrization(block.down, "weight", Tanh())
            elif self.kind == "weight norm":
                parametrizations.weight_norm(block.up)
            elif self.kind == "spectral norm":
                parametrizations.spectral_norm(block.up)
            elif self.kind == "orthogonal":
                parametrizations.orthogonal(block.up)
            elif self.kind == "old weight norm":
                torch.nn.utils.weight_norm(block.up)
            elif self.kind == "old spectral norm":
                torch.nn.utils.spectral_norm(block.up)
        return net

    def units(self, model: Any) -> list[Any]:
        return [*model.blocks, model] if self.whole else [*(b.up for b in model.blocks), *model.blocks, model]

    def clone(self, model: nn.Module) -> nn.Module:
        if not self.kind.startswith("old"):
            return copy.deepcopy(model)
        # The hooks keep the weight they computed, a tensor with a graph, which deepcopy refuses.
        new = self.build()
        for mine, theirs in zip(new.parameters(), model.parameters(), strict=True):
            mine.data.copy_(theirs.data)
            mine.requires_grad_(theirs.requires_grad)
        for mine, theirs in zip(new.buffers(), model.buffers(), strict=True):
            mine.data.copy_(theirs.data)
        return new


for _kind in ("custom", "weight norm", "spectral norm", "orthogonal", "old weight norm", "old spectral norm"):
    for _whole in (True, False):
        _name = f"parametrized: {_kind}" + ("" if _whole else ", the layer as a unit")
        case(_name, _kind, _whole)(Parametrized)
CASES["parametrized: orthogonal"].precisions = ("fp32",)
CASES["parametrized: orthogonal, the layer as a unit"].precisions = ("fp32",)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=False)[0]


@case("attention", lambda b: [])
@case("attention: out_proj as a unit of its own", lambda b: [b.attention.out_proj])
@case("attention and its out_proj as units", lambda b: [b.attention.out_proj, b.attention])
class MultiheadAttention(Case):
    sums_differ_in_bf16 = True

    def __init__(self, inner: Callable[[Any], list[Any]]) -> None:
        self.inner = inner

    def build(self) -> nn.Module:
        return Net(2, Attention)

    def units(self, model: Any) -> list[Any]:
        return [*(m for b in model.blocks for m in self.inner(b)), *model.blocks, model]

    def train(self, model: Any, batch: Batch) -> Any:
        x = batch.randn(2, 3, DIM)
        model.eval()  # without gradients torch has a path that reads all weights at once
        with torch.no_grad():
            before = model(x)
        model.train()
        y = model(x)
        loss_of(y).backward()
        return before, y


@case("LSTM")
class Recurrent(Case):
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(DIM, DIM, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    precisions = ("fp32",)

    def build(self) -> nn.Module:
        return Net(2, self.Cell)

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.randn(2, 3, DIM))
        loss_of(y).backward()
        return y


@case("dropout", 0.5)
class Dropout(Case):
    """Random numbers are drawn as often and in the same order as without sharding, also when recomputed."""

    class Dropping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(checkpoint(super().forward, x, use_reentrant=False), 0.3)

    def __init__(self, p: float) -> None:
        self.p = p

    def build(self) -> nn.Module:
        return Net(3, self.Dropping)

    def train(self, model: Any, batch: Batch) -> Any:
        torch.manual_seed(batch.rank + 10 * batch.step)
        y = nn.functional.dropout(model(batch.x), self.p)
        loss_of(y).backward()
        return y


@case("batch norm")
class BatchNorm(Case):
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(super().forward(x))

    precisions = ("fp32",)

    def build(self) -> nn.Module:
        return Net(2, self.Normed)
