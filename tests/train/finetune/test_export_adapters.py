"""`shardwright export --adapters`: the adapters of a run as files of peft."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import cli
from shardwright.checkpoint import open_stored
from shardwright.train.finetune import adapters
from shardwright.train.finetune.finetuning import peft_names
from shardwright.train.finetune.peft_files import read_adapters
from shardwright.train.models.build import model_of
from shardwright.train.step import loading
from tests.train.finetune.kit import tokens
from tests.train.kit.jobs import TINY, config_file, run_config, steps_in, train_here
from tests.train.models.kit.architectures import folder_with
from tests.train.models.kit.foreign import JOB

MODULE = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocab_size, 32), nn.Linear(32, vocab_size)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.out(x)
"""
LORA = ("--finetune.rank", "4", "--run.sample_tokens", "0", "--optimizer.lr", "0.05", "--run.dir", "run")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The current folder. Its module is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    (tmp_path / "my_adapted.py").write_text(MODULE)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("my_adapted", None)


def peft() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft", reason="needs peft, to compare with")


def adapted() -> Any:
    """The model of the run before training."""
    config = run_config(Path("run"))
    torch.manual_seed(config.run.seed)
    model = model_of(config.model.shape())
    model.read_weights()
    adapters.adapt(model, config.finetune, config.run.seed)
    return model


def trained() -> Any:
    model = adapted()
    step = steps_in(Path("run/checkpoints"))[0]
    loading.load_weights(Path(f"run/checkpoints/step-{step}"), model)
    return model


def train(kind: str, method: str, folder: Path) -> None:
    own: dict[str, tuple[str | Path, ...]] = {
        "llama": (),
        "python": ("--model.kind", "python", "--model.target", "my_adapted:Mine"),
        "hf": (
            "--model.kind",
            "hf",
            "--model.path",
            folder / "base",
            "--finetune.train_also",
            '["*norm.weight"]',
        ),
    }
    if kind == "hf":
        pytest.importorskip("transformers", reason="needs transformers")
        folder_with("llama", folder / "base")
    job = config_file(folder, TINY if kind == "llama" else JOB)
    options = ("--finetune.method", method, "--parallel.engine", "none", "--train.steps", "3")
    assert train_here(job, *own[kind], *LORA, *options) == 0


@pytest.mark.extensive("a run of each kind with each method", but=("hf-lora", "python-dora", "llama-lora"))
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("kind", ["llama", "python", "hf"])
def test_the_files_have_the_values_of_the_run(
    folder: Path, kind: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(kind, method, folder)
    capsys.readouterr()
    assert cli.main(["export", "--adapters", "run", "out"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("out: step 3, ") and line.count("\n") == 1 and "peft." in line
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads(Path("out/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == (str(folder / "base") if kind == "hf" else None)
    assert config["task_type"] == (None if kind == "python" else "CAUSAL_LM")
    assert config["use_dora"] == (method == "dora") and config["r"] == 4
    ours, read = trained(), adapted()
    run = run_config(Path("run"))
    read_adapters(read, "out", run.finetune, key_map=peft_names(read, run.model.shape()))
    with torch.no_grad():
        assert torch.equal(read(tokens(0)), ours(tokens(0)))
        assert not torch.equal(adapted()(tokens(0)), ours(tokens(0)))
    assert cli.main(["export", "--adapters", "run", "half", "--dtype", "bfloat16"]) == 0
    assert {each.dtype for each in open_stored(Path("half/adapter_model.safetensors")).values()} == {
        torch.bfloat16
    }


@pytest.mark.extensive("a run of each kind with each method", but=("hf-lora", "python-dora"))
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("kind", ["python", "hf"])
def test_peft_computes_the_same_logits(folder: Path, kind: str, method: str) -> None:
    library = peft()
    train(kind, method, folder)
    assert cli.main(["export", "--adapters", "run", "out"]) == 0
    ours = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of missing or unexpected keys
        if kind == "hf":
            theirs = library.AutoPeftModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)
        else:
            theirs = library.PeftModel.from_pretrained(adapted_base(), "out")
    with torch.no_grad():
        logits = theirs(tokens(0))
        # The formulas of dora differ.
        close = {"rtol": 0, "atol": 0 if method == "lora" else 2e-5}
        torch.testing.assert_close(getattr(logits, "logits", logits), ours(tokens(0)), **close)


def adapted_base() -> Any:
    """The module of the run without adapters."""
    config = run_config(Path("run"))
    torch.manual_seed(config.run.seed)
    return model_of(config.model.shape()).model  # type: ignore[attr-defined]


def test_a_run_of_the_kind_python_starts_from_adapters(folder: Path) -> None:
    train("python", "lora", folder)
    assert cli.main(["export", "--adapters", "run", "out"]) == 0
    own = (
        "--model.kind",
        "python",
        "--model.target",
        "my_adapted:Mine",
        "--finetune.method",
        "lora",
        *LORA[:-1],
    )
    options = ("second", "--finetune.adapters", "out", "--train.steps", "1", "--parallel.engine", "none")
    assert train_here(folder / "tiny.toml", *own, *options) == 0


def test_what_has_no_files_of_adapters_is_refused(
    folder: Path, plain_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (
            (plain_run, "out"),
            'error: --adapters: expected a run with finetune.method "lora" or "dora", found "full"',
        ),
        (
            (plain_run, "out", "--max-shard-size", "1 GB"),
            "error: --max-shard-size: expected none with --adapters",
        ),
        ((plain_run, "."), "error: export: expected a new folder"),
        (("none", "out"), "found no such folder"),
    ):
        assert cli.main(["export", "--adapters", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert not Path("out").exists()


@pytest.mark.extensive("a run for each dtype", but=("None",))
@pytest.mark.parametrize("dtype", ["float32", "float16", None])
def test_adapters_on_a_narrow_base_are_merged_in_the_dtype_of_the_export(
    folder: Path, dtype: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = config_file(folder, TINY)
    options = (
        "--finetune.method",
        "lora",
        "--finetune.base_dtype",
        "bfloat16",
        "--parallel.engine",
        "shardwright",
    )
    assert train_here(job, *LORA, *options, "--train.steps", "3") == 0
    assert cli.main(["export", "run", "out", *(["--dtype", dtype] if dtype else [])]) == 0
    stored = open_stored(Path("out/model.safetensors"))
    wanted = getattr(torch, dtype or "bfloat16")
    layers = dict(adapters.adapted_layers(trained()))
    with torch.no_grad():
        for number in range(2):
            layer = layers[f"layers.{number}.attention.wo"]
            whole = layer.weight.float() + layer.scale * (layer.lora_b @ layer.lora_a)
            found = stored[f"model.layers.{number}.self_attn.o_proj.weight"].view()
            assert torch.equal(found, whole.to(wanted))
            assert torch.equal(whole.bfloat16().to(wanted), found) == (dtype is None)
    assert cli.main(["generate", "run", "--prompt", "ab", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("ab")
