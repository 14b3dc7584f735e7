"""The examples of docs/pretrained.md and docs/checkpoints.md run, one after another, as a reader would paste them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright.checkpoint import open_stored
from tests.support import multirank, world_mesh

DOCS = Path(__file__).parents[2] / "docs"


def run_examples(page: Path, count: int, world_size: int, folder: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(examples) == count
    names = {"sw": sw, "torch": torch, "mesh": world_mesh(world_size), "folder": folder}
    for example in examples:
        exec(compile(example, str(page), "exec"), names)


@multirank(2)
def test_examples_of_the_page_run(rank: int, world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs the extra train")
    run_examples(DOCS / "pretrained.md", 6, world_size, tmp_path / "saved")


@pytest.mark.extensive("a page of examples")
@multirank(2)
def test_examples_of_the_page_on_checkpoints_run(rank: int, world_size: int, tmp_path: Path) -> None:
    run_examples(DOCS / "checkpoints.md", 10, world_size, tmp_path)


def test_commands_of_the_page_on_checkpoints_are_understood(tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs the extra train")
    from shardwright.cli.program import _parsers

    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / "checkpoints.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 10
    parser, parsers = _parsers()
    for line in lines:
        arguments = shlex.split(line, comments=True)[1:]
        if arguments[0] in parsers:
            parser.parse_args(arguments)


def test_conversions_of_the_page_on_checkpoints_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pydantic", reason="needs the extra train")
    from shardwright import cli

    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"attn": torch.nn.Linear(2, 2)})])
    model.register_buffer("inv_freq", torch.ones(2))
    sw.save_checkpoint(tmp_path / "ours", model)
    text = (DOCS / "checkpoints.md").read_text()
    line = next(line for line in text.splitlines() if "--key-map '" in line)
    arguments = [str(tmp_path / each) if each[-1] == "/" else each for each in shlex.split(line)[1:]]
    assert cli.main(arguments) == 0, capsys.readouterr().err
    stored = open_stored(tmp_path / "out")
    assert stored.keys() == {"h.0.attention.weight", "h.0.attention.bias"}
