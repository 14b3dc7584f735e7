"""`shardwright generate`: what it draws, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from shardwright import cli
from shardwright.train.checkpoint import load_weights
from shardwright.train.config import load_config
from shardwright.train.data import decode
from shardwright.train.generate import generate, sample
from shardwright.train.models.llama import build_model
from tests.train.jobs import config_file, run, train_here


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert train_here(config_file(folder), "--run.dir", folder / "run") == 0
    return folder / "run"


def test_without_temperature_the_likeliest_token_is_taken(trained: Path) -> None:
    model = build_model(load_config(trained / "config.toml").model, 256)
    load_weights(trained / "checkpoints" / "step-8", model)
    tokens = list(b"The class")
    for _ in range(70):  # beyond the 64 positions the model knows
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens[-64:]]))[0, -1].argmax()))
    text = generate(trained, "The class", tokens=70, temperature=0.0, top_k=0, seed=0)
    assert text == "The class" + decode(tokens[9:])


def test_draws_repeat_with_the_seed_and_differ_without(trained: Path) -> None:
    texts = [generate(trained, "def", tokens=40, temperature=1.0, top_k=50, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert generate(trained, "def", tokens=0, temperature=1.0, top_k=50, seed=0) == "def"


class Ramp(torch.nn.Module):
    """A model whose logits are always 0, 1, ..., 9."""

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return torch.arange(10.0).expand(*tokens_BS.shape, 10)


@pytest.mark.parametrize(("top_k", "allowed"), [(1, {9}), (3, {7, 8, 9}), (0, set(range(10))), (99, set(range(10)))])
def test_top_k_limits_the_draw(top_k: int, allowed: set[int]) -> None:
    drawn = sample(
        Ramp(), torch.tensor([0]), count=600, temperature=5.0, top_k=top_k, seed=0, context=4,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert set(drawn) == allowed


def test_any_engine_and_number_of_ranks_can_be_read(trained: Path, tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    status, _, err = run("train", config, "--nproc", "2", "--parallel.engine", "shardwright", "--run.dir", folder)
    assert (status, err) == (0, "")
    arguments = {"tokens": 30, "temperature": 0.0, "top_k": 0, "seed": 0}
    assert generate(folder, "import ", **arguments) == generate(trained, "import ", **arguments)


def test_what_cannot_be_read_is_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(trained, bare)
    shutil.rmtree(bare / "checkpoints")
    for folder, message in ((tmp_path, "found no run.json"), (bare, "expected a whole checkpoint, found none")):
        assert cli.main(["generate", str(folder), "--prompt", "x"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and error.count("\n") == 1
