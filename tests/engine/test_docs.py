"""The examples of docs/parallelism.md run, one after another, as a reader would paste them."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

import shardwright as sw
from tests.engine.models import build
from tests.support import multirank

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"


class Experts(nn.Module):
    def __init__(self, experts: int, dim: int) -> None:
        super().__init__()
        self.weights_EDD = nn.Parameter(torch.randn(experts, dim, dim))


@multirank(4)
def test_examples_of_the_parallelism_page_run(rank: int, world_size: int) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 3
    names = {"sw": sw, "torch": torch, "nn": nn, "distribute_tensor": distribute_tensor, "Experts": Experts}
    names |= {"model": build(), "tokens": torch.arange(16).view(2, 8) % 11}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    assert names["norm"] > 0
