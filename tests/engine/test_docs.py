"""The examples of some pages of docs/ run, one after another, as a reader would paste them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

import shardwright as sw
from tests.engine.kit.models import Block, build, tokens
from tests.support import multirank, world_mesh

DOCS = Path(__file__).parents[2] / "docs"


@multirank(2)
def test_examples_of_the_convenience_page_run(rank: int, world_size: int) -> None:
    page = (DOCS / "convenience.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 7
    model = build(dim=64, hidden=256, vocab=64)
    names = {"sw": sw, "torch": torch, "nn": nn, "mesh": world_mesh(2), "model": model, "Block": Block}
    names["tokens"] = tokens(0, 0, rank)
    output = io.StringIO()
    for example in examples:
        with contextlib.redirect_stdout(output):
            exec(compile(example, "convenience.md", "exec"), names)
    assert output.getvalue() == re.findall(r"```\n(unit .*?)```", page, re.DOTALL)[0]


@multirank(2)
def test_the_example_of_two_models_runs(rank: int, world_size: int) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "can_i.md").read_text(), re.DOTALL)
    chosen, rejected = tokens(0, 0, rank), tokens(1, 0, rank)

    def shard(model: nn.Module) -> nn.Module:
        return sw.fully_shard(model, mesh=world_mesh(2))

    names: dict[str, Any] = {"sw": sw, "torch": torch, "shard": shard, "build": build}
    names |= {"chosen": chosen, "rejected": rejected}
    exec(compile(example, "can_i.md", "exec"), names)
    policy, reference = names["policy"], names["reference"]
    assert all(p.grad is None for p in reference.parameters())
    moved = [
        (p - q).full_tensor().abs().max()
        for p, q in zip(policy.parameters(), reference.parameters(), strict=True)
    ]
    assert max(moved) > 0  # with equal weights before the step the margin is 0, and its gradient is not


class Experts(nn.Module):
    def __init__(self, experts: int, dim: int) -> None:
        super().__init__()
        self.weights_EDD = nn.Parameter(torch.randn(experts, dim, dim))


@multirank(4)
def test_examples_of_the_parallelism_page_run(rank: int, world_size: int) -> None:
    page, _, _ = (DOCS / "parallelism.md").read_text().partition("### In your own loop")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    names: dict[str, Any] = {"sw": sw, "torch": torch, "nn": nn, "distribute_tensor": distribute_tensor}
    names["Experts"] = Experts
    names |= {"model": build(), "tokens": torch.arange(16).view(2, 8) % 11}
    for example in examples:
        exec(compile(example, "parallelism.md", "exec"), names)
    assert names["norm"] > 0
