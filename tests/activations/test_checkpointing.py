"""Checkpointing of blocks: gradients are those of blocks that keep everything, whatever the blocks write in place."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardwright as sw
from shardwright.activations import checkpoint_blocks
from shardwright.engine.compat import TorchDispatchMode

#: Things that a block does with the result of its first matrix product, which "ops" keeps.
WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda y: y,
    "whole": lambda y: y.mul_(0.5),
    "a view": lambda y: (y[:, ::2].add_(0.25), y)[1],
    "a reshaped view": lambda y: (y.view(-1, 2)[:, 0].clamp_(-0.3, 0.3), y)[1],
    "twice": lambda y: y.mul_(0.5).add_(1),
    "after it was used": lambda y: (y.detach().clone() + y.sum()) + y.add_(0.125),
    "rows by index": lambda y: y.index_add_(0, torch.tensor([0, 2]), torch.ones(2, y.shape[1])),
    "scattered": lambda y: y.scatter_(1, torch.zeros(len(y), 1, dtype=torch.long), 0.5),
    "filled where": lambda y: y.masked_fill_(y.detach() > 0.5, 0.1),
    "another product after it": lambda y: (y @ y.T).mul_(0.1) @ y,
    "without gradients": lambda y: _untracked(y),
    "into an argument": lambda y: y + torch.mul(y.detach(), 2, out=torch.empty_like(y)),
}


def _untracked(y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = y @ y.T
        scale.mul_(0.01)
    return scale @ y


class Block(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.write = nn.Linear(8, 12), nn.Linear(12, 8), write

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.write(self.first(x))))


@pytest.mark.parametrize("offloaded", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("kind", ["full", "layers", "ops", "half_ops"])
@pytest.mark.parametrize("name", WRITES)
def test_results_that_are_written_in_place(name: str, kind: str, offloaded: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WRITES[name]) for _ in range(3)))
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    plain(x).square().sum().backward()
    checkpoint_blocks(model, kind, 2)
    if offloaded:
        sw.offload_activations(model, min_bytes=1)
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("backward", [False, True])
def test_kept_results_are_freed_without_the_collector(backward: bool) -> None:
    products: list[StorageWeakRef] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.addmm.default:
                products.append(StorageWeakRef(result.untyped_storage()))
            return result

    model = nn.Sequential(*(Block(WRITES["whole"]) for _ in range(2)))
    checkpoint_blocks(model, "ops")
    gc.collect()
    gc.disable()
    try:
        with Noted():
            loss = model(torch.randn(4, 8)).square().sum()
        if backward:
            loss.backward()
        del loss
        assert products and all(each.expired() for each in products)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind, again", [("none", 0), ("ops", 0), ("half_ops", 2), ("full", 4)])
def test_so_many_products_are_computed_again(kind: str, again: int) -> None:
    """The block has four products. Each needs two more for its gradients."""

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func._schema.name in ("aten::mm", "aten::addmm")
            return func(*args, **(kwargs or {}))

    class Four(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=i % 2 == 0) for i in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x * x

    blocks = [Four()]
    checkpoint_blocks(blocks, kind)
    x = torch.randn(4, 8, requires_grad=True)
    with Products() as products:
        blocks[0](x).sum().backward()
    assert products.count == 4 + again + 8
