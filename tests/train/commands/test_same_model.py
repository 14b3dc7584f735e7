"""Ranks that do not start with the same model, code or environment are named before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright.train.errors import UserError
from shardwright.train.parallel.recipe import check_same_model
from tests.support import multirank, world_mesh
from tests.train.kit.jobs import TINY, config_file, ranks
from tests.train.models.kit.user_module import Module

OWN = """
import os
import torch
from tests.train.models.kit.user_module import Module

def build(vocab_size):
    {change}
    return Module(vocab_size)
"""
_REST = TINY[: TINY.index("[model]")] + TINY[TINY.index("[train]") :]
CONFIG = _REST + '[model]\nkind = "python"\ntarget = "own_model:build"\n'


def said_by(folder: Path, codes: tuple[str, str], engine: str) -> str:
    """The output of two ranks, each in its own folder with its own code of the model."""
    for rank, code in enumerate(codes):
        config_file(folder / f"of{rank}", CONFIG)
        (folder / f"of{rank}" / "own_model.py").write_text(code)
    ended = ranks(
        2, "train", "tiny.toml", "--parallel.engine", engine, "--run.dir", folder / "run",
        folders=[folder / "of0", folder / "of1"],
    )  # fmt: skip
    said = "".join(err for _, err in ended)
    assert [status for status, _ in ended] == [2, 2], said
    assert said.count("\n") == 1 and not (folder / "run" / "metrics.jsonl").exists()
    return said


@pytest.mark.parametrize("engine", ["ddp", "shardwright"])
def test_other_initial_values_on_one_rank_are_named(tmp_path: Path, engine: str) -> None:
    """Also of a model that gets its values in its shards."""
    code = OWN.format(change="torch.rand(int(os.environ['RANK']) + 1)")
    said = said_by(tmp_path, (code, code), engine)
    assert said.startswith("error: The ranks start with different values of ")
    assert "own_model:build" in said and "layers.1.mix.bias' on rank 1" in said


@pytest.mark.extensive("a job of processes of its own")
def test_other_code_of_a_model_on_one_host_is_named(tmp_path: Path) -> None:
    said = said_by(tmp_path, (OWN.format(change="pass"), OWN.format(change="pass # other")), "ddp")
    assert said.startswith("error: expected the same job on every rank, found the file of own_model: sha256 ")


@multirank(2)
def test_tensors_that_differ_are_named(rank: int, world_size: int) -> None:
    mesh = world_mesh(2)
    torch.manual_seed(0)
    model = Module(16)
    check_same_model(model, mesh, "a model")
    with torch.no_grad():
        model.layers[1].mix.bias[3] += rank
    with pytest.raises(
        UserError, match=r"these tensors differ from rank 0: 'layers\.1\.mix\.bias' on rank 1\."
    ):
        check_same_model(model, mesh, "a model")
    torch.manual_seed(0)
    with pytest.raises(
        UserError, match=r"rank 0 has .*'embedding\.weight', \(16, 24\).*, rank 1 .*\(17, 24\)"
    ):
        check_same_model(Module(16 + rank), mesh, "a model")
