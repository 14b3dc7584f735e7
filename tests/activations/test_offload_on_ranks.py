"""Activations in the host's memory on ranks: losses, gradients and weights have the bits of the run without it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.activations import checkpoint_blocks, compile_blocks
from tests.engine.kit.models import Model, full, loss_of, tokens
from tests.support import multirank, world_mesh
from tests.support.matrix import generate

AXES: dict[str, list[Any]] = {
    "checkpoint": ["none", "full", "layers", "ops"],
    "kind": ["blocks", "inputs"],
    "memory": ["dynamic", "arena", "max_pool", "double_buffer"],
    "compiled": ["none", "aot_eager"],
    "strategy": ["zero3", "zero2", "zero1", "ddp"],
    "layout": ["per_parameter", "ragged", "element"],
    "micros": [1, 2],
    "dtype": [None, torch.bfloat16],
}


def excluded(one: str, a: Any, other: str, b: Any) -> bool:
    both = {one: a, other: b}
    # All units keep their full parameters, so pools are refused.
    return (
        both.keys() == {"memory", "strategy"}
        and both["memory"] in ("max_pool", "double_buffer")
        and both["strategy"] != "zero3"
    )


class Outcome(NamedTuple):
    losses: list[Tensor]
    gradients: list[Tensor]
    weights: list[Tensor]


def train(row: dict[str, Any], rank: int, offloaded: bool) -> Outcome:
    torch.manual_seed(0)
    model = Model(layers=4, dim=16, hidden=40)
    checkpoint_blocks(model.blocks, row["checkpoint"])
    if row["compiled"] != "none":
        torch._dynamo.reset()
        compile_blocks(model.blocks, row["compiled"])
    options = {
        "mesh": world_mesh(2),
        "strategy": row["strategy"],
        "layout": row["layout"],
        "mp_policy": sw.MixedPrecisionPolicy(param_dtype=row["dtype"]),
    }
    for block in model.blocks:
        sw.fully_shard(block, **options)
    sw.fully_shard(model, memory=row["memory"], **options)
    offload = sw.offload_activations(model.blocks, row["kind"], min_bytes=0) if offloaded else None
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses, gradients = [], []
    for step in range(3):
        for micro in range(row["micros"]):
            batch = tokens(step, micro, rank)
            model.set_requires_gradient_sync(micro == row["micros"] - 1)
            loss = loss_of(model(batch), batch)
            loss.backward()
            losses.append(loss.detach())
        gradients += [full(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    assert offload is None or offload.host_bytes > 0
    return Outcome(losses, gradients, [full(p.detach()) for p in model.parameters()])


def check(row: dict[str, Any], rank: int) -> None:
    plain, offloaded = train(row, rank, False), train(row, rank, True)
    for name, left, right in zip(Outcome._fields, plain, offloaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True)), name


@pytest.mark.extensive("each pair of settings", but=("none-inputs-*", "*-none-ddp-*"))
@multirank(2)
@pytest.mark.parametrize("row", generate(AXES, excluded, 2), ids=lambda row: "-".join(map(str, row.values())))
def test_bits_are_those_of_the_run_without_offload(rank: int, world_size: int, row: dict[str, Any]) -> None:
    check(row, rank)


@pytest.mark.extensive("compiles with a C++ compiler")
@multirank(2)
@pytest.mark.parametrize("checkpoint", AXES["checkpoint"])
def test_bits_with_inductor(rank: int, world_size: int, checkpoint: str) -> None:
    row = {name: values[0] for name, values in AXES.items()}
    check(row | {"checkpoint": checkpoint, "compiled": "inductor"}, rank)


@multirank(2)
@pytest.mark.parametrize("checkpoint", ["none", "ops"])
def test_weights_never_move(rank: int, world_size: int, checkpoint: str) -> None:
    """Autograd saves weights, transposed weights and slices of them. The host gets what a plain model's blocks save."""
    sizes = []
    for engine in ("none", "shardwright"):
        torch.manual_seed(0)
        model = Model(layers=3, dim=16, hidden=40)
        checkpoint_blocks(model.blocks, checkpoint)
        if engine == "shardwright":
            for block in model.blocks:
                sw.fully_shard(block, mesh=world_mesh(2))
            sw.fully_shard(model, mesh=world_mesh(2))
        offload = sw.offload_activations(model.blocks, min_bytes=0)
        batch = tokens(0, 0, rank)
        loss_of(model(batch), batch).backward()
        sizes.append(offload.host_bytes)
    assert sizes[0] == sizes[1] > 0


class Borrows(nn.Module):
    """Multiplies with a weight of the root."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(16, 16)
        self.lender = [lender]  # which is no submodule

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(x, self.lender[0].weight)


class Lends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Borrows(self.table) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@multirank(2)
def test_weights_of_other_units_never_move(rank: int, world_size: int) -> None:
    model = Lends()
    for block in model.blocks:
        sw.fully_shard(block, mesh=world_mesh(2))
    sw.fully_shard(model, mesh=world_mesh(2))
    offload = sw.offload_activations(model.blocks, min_bytes=0)
    model(torch.randn(4, 16)).sum().backward()
    assert offload.host_bytes == 2 * 256  # the inputs'


@multirank(2)
def test_the_example_of_the_page_runs(rank: int, world_size: int) -> None:
    page = Path(__file__).parents[2] / "docs" / "activation_offload.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, page.name, "exec"), names)
    assert names["offload"].host_bytes > 0
