"""The examples of docs/convenience.md run, one after another, as a reader would paste them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch
from torch import nn

import shardwright as sw
from tests.engine.models import Block, build, tokens
from tests.support import multirank, world_mesh

PAGE = Path(__file__).parents[2] / "docs" / "convenience.md"


@multirank(2)
def test_examples_of_the_convenience_page_run(rank: int, world_size: int) -> None:
    page = PAGE.read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 5
    model = build(dim=64, hidden=256, vocab=64)
    names = {"sw": sw, "torch": torch, "nn": nn, "mesh": world_mesh(2), "model": model, "Block": Block}
    names["tokens"] = tokens(0, 0, rank)
    output = io.StringIO()
    for example in examples:
        with contextlib.redirect_stdout(output):
            exec(compile(example, str(PAGE), "exec"), names)
    assert output.getvalue() == re.findall(r"```\n(unit .*?)```", page, re.DOTALL)[0]
