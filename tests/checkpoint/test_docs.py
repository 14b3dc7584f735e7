"""The examples of docs/pretrained.md run, one after another, as a reader would paste them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import shardwright as sw
from tests.support import multirank, world_mesh

PAGE = Path(__file__).parents[2] / "docs" / "pretrained.md"


@multirank(2)
def test_examples_of_the_page_run(rank: int, world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs the extra train")
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 6
    names = {"sw": sw, "torch": torch, "mesh": world_mesh(world_size), "folder": tmp_path / "saved"}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
