"""`[finetune] freeze` and `train_only`: what is trained, and runs that go on, export and generate without adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import cli
from shardwright.checkpoint import open_stored
from shardwright.train.config import FinetuneConfig
from shardwright.train.errors import UserError
from shardwright.train.finetune.adapters import adapt, trained_names
from shardwright.train.models.build import model_of
from tests.train.kit.jobs import config_file, ranks, tiny, train_here
from tests.train.models.kit.architectures import folder_with
from tests.train.models.kit.foreign import JOB


def trained(model: Any = None, **settings: Any) -> list[str]:
    model = model or model_of(tiny().model.shape())
    adapt(model, FinetuneConfig(**settings), 0)
    return trained_names(model)


#: Settings, and a part of each name that is trained.
CHOICES: dict[str, tuple[dict[str, Any], Any]] = {
    "nothing": ({}, lambda name: True),
    "a module": ({"freeze": ["tok_embeddings"]}, lambda name: "tok_embeddings" not in name),
    "a layer": ({"freeze": ["layers.0"]}, lambda name: "layers.0." not in name),
    "a pattern": (
        {"freeze": ["layers.*.attention", "*norm.weight"]},
        lambda name: "attention." not in name and "norm" not in name,
    ),
    "all but a layer": ({"train_only": ["layers.1"]}, lambda name: "layers.1." in name),
    "all but some": ({"train_only": ["output.weight", "*norm*"]}, lambda name: "output" in name or "norm" in name),
}  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
def test_patterns_choose(choice: str) -> None:
    settings, wanted = CHOICES[choice]
    names = [name for name, _ in model_of(tiny().model.shape()).named_parameters()]
    found = trained(**settings)
    assert found == [name for name in names if wanted(name)] and found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": ["layer.0"]}, "finetune.freeze: expected patterns of parameters, found 'layer.0', which fits none"),
        ({"train_only": ["nrom"]}, "finetune.train_only: expected patterns of parameters, found 'nrom'"),
        ({"freeze": ["*"]}, "finetune.freeze: expected a parameter that is trained, found none"),
    ],
)  # fmt: skip
def test_patterns_that_fit_nothing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        trained(**settings)


def test_tied_weights_are_frozen_under_each_name() -> None:
    for name in ("tok_embeddings", "output"):
        model: Any = model_of(tiny(model={"tied_embeddings": True}).model.shape())
        adapt(model, FinetuneConfig(freeze=(name,)), 0)
        assert not model.output.weight.requires_grad and not model.tok_embeddings.weight.requires_grad


def test_a_run_leaves_frozen_weights_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are in no checkpoint, and in the export. A resume compares them."""
    pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.chdir(tmp_path)
    folder_with("llama", tmp_path / "base")
    job = config_file(tmp_path, JOB)
    options = [
        "--model.kind",
        "hf",
        "--model.path",
        "base",
        "--finetune.freeze",
        '["layers.0"]',
        "--run.dir",
        "run",
    ]
    assert train_here(job, *options, "--train.steps", "3") == 0
    assert "trains " in capsys.readouterr().out
    status = ranks(2, "train", job, *options, "--train.steps", "4", "--resume", "run")
    assert [code for code, _ in status] == [0, 0], status
    assert cli.main(["export", "run", "out"]) == 0
    assert cli.main(["generate", "run", "--prompt", "ab", "--tokens", "2"]) == 0
    before, after = (open_stored(Path(folder, "model.safetensors")) for folder in ("base", "out"))
    for key, tensor in after.items():
        same = torch.equal(tensor.view(), before[key].view())
        assert same == ("layers.0." in key), key
