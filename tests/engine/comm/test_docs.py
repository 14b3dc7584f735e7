"""The examples of docs/communication.md run, one after another, as a reader would paste them."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

import shardwright as sw
from tests.support import multirank, world_mesh

PAGE = Path(__file__).parents[3] / "docs" / "communication.md"


@multirank(2)
def test_examples_of_the_communication_page_run(rank: int, world_size: int) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 6
    names = {"sw": sw, "torch": torch, "nn": nn, "mesh": world_mesh(world_size)}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    assert names["model"][0].weight.grad is not None
