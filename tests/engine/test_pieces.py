"""Examples of pages that are pieces of a program: each runs on two ranks, with the names that its page supposes.

Examples that are whole programs run in the tests of their rooms.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.support import multirank, world_mesh

DOCS = Path(__file__).parents[2] / "docs"
#: The pages and the numbers of their examples that run here; test_memory.py runs the class Freelist.
PIECES = {
    "construction": (0, 1, 2),
    "strategies": (0, 1, 2, 3),
    "layouts": (0, 1),
    "memory": (0, 1, 2, 3),
    "engine": (0,),
}


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.Linear(64, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, 4)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index][0]

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def shard(model: Model, **options: Any) -> Model:
    for block in model.blocks:
        sw.fully_shard(block, mesh=world_mesh(2), **options)
    return sw.fully_shard(model, mesh=world_mesh(2), **options)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def names_of(page: str, number: int) -> dict[str, Any]:
    """The names that an example supposes: a plain model, or a sharded one that has made a step."""
    names: dict[str, Any] = {"sw": sw, "torch": torch, "nn": nn, "Model": Model, "config": 16, "shard": shard}
    names |= {"block": nn.Linear(64, 64), "micro_batches": torch.randn(2, 2, 16), "replicas": 1, "shards": 2}
    names |= {"loss_of": loss_of, "tokens_here": 2, "world_size": 2, "tokens": 4}
    names |= {"groups_of": lambda model: [{"params": list(model.parameters())}], "mesh": world_mesh(2)}
    model = Model()
    plain = (page, number) in {("strategies", 0), ("layouts", 0), ("memory", 0), ("memory", 2), ("memory", 3)}
    if (page, number) == ("construction", 2):
        with sw.deferred_init():
            model = Model()
    elif not plain:
        shard(model, layout="ragged" if page == "layouts" else "per_parameter")
        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        loss_of(model, torch.randn(2, 16)).backward()
        optimizer.step()
        other = shard(Model(), strategy="zero1", layout="ragged")
        names |= {"optimizer": optimizer, "other": other}
        names |= {"its_optimizer": sw.fully_shard_optimizer(torch.optim.AdamW(other.parameters()))}
        names |= {"cross_entropy": loss_of(model, torch.randn(2, 16))}
    return names | {"model": model, "blocks": model.blocks}


def run(example: str, page: str, names: dict[str, Any]) -> None:
    exec(compile(example.replace('"cuda"', '"cpu"'), f"{page}.md", "exec"), names)


@pytest.mark.extensive("process groups of a second mesh, and a checkpoint")
@multirank(2)
@pytest.mark.parametrize("page", PIECES)
def test_pieces_of_the_page_run(rank: int, world_size: int, page: str, tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    os.chdir(tmp_path)
    for number in PIECES[page]:
        if (page, number) == ("layouts", 0):  # each line is another way to shard the block
            for line in examples[number].splitlines():
                run(line, page, names_of(page, number))
        else:
            run(examples[number], page, names_of(page, number))
