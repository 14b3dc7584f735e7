"""Weights used after forward, as a chunked or fused cross-entropy does with those of the output layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from tests.engine.kit.edits import average, check_same
from tests.support import multirank

WAYS = ["unshard", "unshard each chunk", "forward", "method"]


class Headed(nn.Module):
    """Forward returns hidden states; a loss multiplies them with the weight of ``head``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h: torch.Tensor = self.body(x)
        return h if y is None else self.loss(h, y)

    def loss(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = [
            F.cross_entropy(F.linear(c, self.head.weight), t, reduction="sum")
            for c, t in zip(h.chunk(2), y.chunk(2), strict=True)
        ]
        return torch.stack(losses).sum() / y.numel()


def backward(model: Any, x: torch.Tensor, y: torch.Tensor, way: str, unit: Any = None) -> None:
    if way == "forward":
        model(x, y).backward()
        return
    h = model(x)
    if way != "unshard each chunk":
        if unit is not None and way == "unshard":
            unit.unshard()
        model.loss(h, y).backward()
        return
    leaf = h.detach().requires_grad_()  # as a chunked loss does, which keeps one chunk's logits at a time
    for c, t in zip(leaf.chunk(2), y.chunk(2), strict=True):
        if unit is not None:
            unit.unshard()
        (F.cross_entropy(F.linear(c, model.head.weight), t, reduction="sum") / y.numel()).backward()
    h.backward(leaf.grad)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("own_unit", [False, True])
def test_a_weight_used_after_forward_has_ways_out(
    rank: int, world_size: int, own_unit: bool, layout: str
) -> None:
    """The unit keeps its full parameters after forward: the root, and one that was asked to."""
    for way in WAYS:
        torch.manual_seed(0)
        plain = Headed()
        model: Any = copy.deepcopy(plain)
        sw.fully_shard(model.body, layout=layout)
        if own_unit:
            sw.fully_shard(model.head, layout=layout, reshard_after_forward=False)
        sw.fully_shard(model, layout=layout, reshard_after_forward=False)
        unit = model.head if own_unit else model
        if way == "method":
            sw.register_fsdp_forward_method(model, "loss")
        torch.manual_seed(1 + rank)
        for _ in range(2):
            x, y = torch.randn(4, 8), torch.randint(16, (4,))
            if not way.startswith("method"):
                plain.zero_grad()
                backward(plain, x, y, "forward")
                average(plain)
                model.loss(model(x), y).backward()
                check_same(plain, model)
                model.zero_grad()
            plain.zero_grad()
            backward(plain, x, y, way)
            average(plain)
            backward(model, x, y, way, unit)
            check_same(plain, model)
            model.zero_grad()
