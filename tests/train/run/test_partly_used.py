"""Runs of a model that does not use all its layers in every step: they resume as if nothing had interrupted them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import shardwright as sw
from tests.train.kit.jobs import TINY, config_file, losses, ranks, steps_in

TARGET = "tests.train.models.kit.partly_used:Module"
ENGINES = {
    "none": ("--parallel.engine", "none"),
    "zero3": ("--parallel.engine", "shardwright"),
    "ragged": ("--parallel.engine", "shardwright", "--parallel.layout", "ragged"),
    "zero1": ("--parallel.engine", "shardwright", "--parallel.strategy", "zero1"),
    "fsdp2": ("--parallel.engine", "fsdp2"),
    "fsdp1": ("--parallel.engine", "fsdp1"),
}


def states(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The tensors of the model and the optimizer in a checkpoint."""
    stored = sw.open_checkpoint(folder / "checkpoints" / f"step-{step}")
    tensors = {
        name: torch.empty(form.shape, dtype=form.dtype)
        for name, form in stored.tensors.items()
        if not name.startswith("generators")
    }
    stored.read(tensors)
    return tensors


@pytest.mark.extensive("runs with each engine", but=("none",))
@pytest.mark.parametrize("engine", ENGINES)
def test_layers_that_no_step_has_used_yet(tmp_path: Path, engine: str) -> None:
    """``sometimes`` has its first gradient in step 2 on one rank, in step 3 on two."""
    model = f'[model]\nkind = "python"\ntarget = "{TARGET}"\n'
    text = re.sub(r"\[model\]\n.*?(?=\[train\])", model, TINY, flags=re.DOTALL)
    config, whole, cut = config_file(tmp_path, text), tmp_path / "whole", tmp_path / "cut"
    count = 1 if engine == "none" else 2
    start, well = ("train", config, *ENGINES[engine]), [0] * count

    def run(*arguments: str | Path) -> list[int | None]:
        return [status for status, _ in ranks(count, *start, *arguments)]  # FSDP2 warns of views

    assert run("--run.dir", whole, "--checkpoint.keep", "9") == well
    assert steps_in(whole / "checkpoints") == [8, 6, 3]
    expected = states(whole, 8)
    assert "optimizer.state.model.sometimes.weight.exp_avg" in expected
    assert not any(name.startswith("optimizer.state.model.unused") for name in expected)
    assert run("--run.dir", cut, "--train.steps", "1") == well
    assert not any(name.startswith("optimizer.state.model.sometimes") for name in states(cut, 1))
    for steps in (5, 8):
        assert run("--resume", cut, "--train.steps", str(steps)) == well
    assert losses(cut) == losses(whole)
    found = states(cut, 8)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
