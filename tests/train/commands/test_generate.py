"""`shardwright generate`: what it draws, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from shardwright import cli
from shardwright.train.commands.generate import generate
from shardwright.train.config import load_config
from shardwright.train.data.tokens.tokenizers import Bytes, open_tokenizer
from shardwright.train.models.build import build_model
from shardwright.train.models.sampling import sample
from shardwright.train.step.loading import load_weights
from tests.train.data.samples import save_tokenizer, texts
from tests.train.kit.jobs import config_file, tiny, train_here


def test_without_temperature_the_likeliest_token_is_taken(plain_run: Path) -> None:
    model = build_model(load_config(plain_run / "config.toml").model, 256)
    load_weights(plain_run / "checkpoints" / "step-8", model)
    tokens = list(b"The class")
    for _ in range(70):  # beyond the 32 positions the model was trained on, and the 64 it has
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens[-32:]]))[0, -1].argmax()))
    text = generate(plain_run, "The class", tokens=70, temperature=0.0, top_k=0, seed=0)
    assert text == "The class" + Bytes().decode(tokens[9:])


def test_the_step_of_a_checkpoint_is_chosen(plain_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(plain_run), "--prompt", "def", "--tokens", "30", "--temperature", "0"]
    texts = {}
    for step in ("6", "8"):
        assert cli.main([*words, "--step", step]) == 0
        texts[step] = capsys.readouterr().out
    assert cli.main(words) == 0
    assert capsys.readouterr().out == texts["8"] != texts["6"]
    assert cli.main([*words, "--step", "7"]) == 2
    assert "--step: expected a step with a checkpoint in " in capsys.readouterr().err


def test_draws_repeat_with_the_seed_and_differ_without(plain_run: Path) -> None:
    texts = [
        generate(plain_run, "def", tokens=40, temperature=1.0, top_k=50, seed=seed) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert generate(plain_run, "def", tokens=0, temperature=1.0, top_k=50, seed=0) == "def"


class Ramp(torch.nn.Module):
    """A model whose logits are always 0, 1, ..., 9."""

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return torch.arange(10.0).expand(*tokens_BS.shape, 10)


@pytest.mark.parametrize(
    ("top_k", "allowed"), [(1, {9}), (3, {7, 8, 9}), (0, set(range(10))), (99, set(range(10)))]
)
def test_top_k_limits_the_draw(top_k: int, allowed: set[int]) -> None:
    drawn = sample(
        Ramp(), torch.tensor([0]), count=600, temperature=5.0, top_k=top_k, seed=0, context=4,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert set(drawn) == allowed


def test_an_end_token_ends_the_text() -> None:
    def drawn(count: int, *ends: int) -> list[int]:
        return sample(
            Ramp(), torch.tensor([0]), count=count, temperature=5.0, top_k=0, seed=0, context=4,
            device=torch.device("cpu"), ends=ends,
        )  # fmt: skip

    all_of_them = drawn(30)
    assert len(all_of_them) == 30 and {3, 7} < set(all_of_them)
    stop = min(all_of_them.index(3), all_of_them.index(7))
    assert drawn(30, 7, 3) == all_of_them[:stop]


def test_a_run_with_a_tokenizer_ends_documents_and_begins_them(tmp_path: Path) -> None:
    """Its end token, those of generation_config.json, and an empty prompt. The command prints none of the ends."""
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    files = save_tokenizer(tmp_path / "tokenizer")
    job = config_file(tmp_path, tiny(train={"steps": 1}, model={"vocab_size": 700}).to_toml())
    folder = tmp_path / "run"
    text = tmp_path / "text.txt"
    text.write_text("\n".join(texts(20)))
    options = ("--data.source", text, "--data.tokenizer", files, "--data.cache", tmp_path / "cache")
    assert train_here(job, *options, "--run.dir", folder, "--validation.every", "0") == 0
    whole = generate(folder, "", tokens=20, temperature=0.0, top_k=0, seed=0)
    tokenizer = open_tokenizer(str(files))
    ids = tokenizer.encode(whole)
    assert tokenizer.begin == 1 and len(ids) > 1
    last = ids[-1]
    (files / "generation_config.json").write_text(json.dumps({"eos_token_id": [last, 0]}))
    cut = generate(folder, "", tokens=20, temperature=0.0, top_k=0, seed=0)
    assert len(cut) < len(whole) and whole.startswith(cut)


def test_any_engine_and_number_of_ranks_can_be_read(plain_run: Path, sharded_run: Path) -> None:
    texts = [
        generate(folder, "import ", tokens=30, temperature=0.0, top_k=0, seed=0)
        for folder in (plain_run, sharded_run)
    ]
    assert texts[0] == texts[1]


def test_what_cannot_be_read_is_refused(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(plain_run, bare)
    shutil.rmtree(bare / "checkpoints")
    for folder, message in (
        (tmp_path, "found no run.json"),
        (bare, "expected a whole checkpoint, found none"),
    ):
        assert cli.main(["generate", str(folder), "--prompt", "x"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_bad_prompts_and_seeds_are_refused(plain_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (("--prompt", "a\udcff"), "--prompt: expected UTF-8 text"),
        (
            ("--prompt", ""),
            "--prompt: expected a text of at least one token, found none in ''; data.tokenizer = 'bytes'",
        ),
        (
            ("--prompt", "a", "--seed", str(2**63)),
            "--seed: expected an integer from 0 to 9223372036854775807",
        ),
    ):
        assert cli.main(["generate", str(plain_run), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert (
        cli.main(["generate", str(plain_run), "--prompt", "a", "--tokens", "1", "--seed", str(2**63 - 1)])
        == 0
    )
