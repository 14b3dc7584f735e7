"""Each example of docs/extending.md has its effect in a run: a number in the line, a file, a changed weight."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.extend import Registry, layouts, memories, strategies
from shardwright.train.extend import hooks, kinds, optimizers, sinks
from tests.support.registries import forgotten_afterwards
from tests.train.kit.hooks import EXAMPLES, JOB
from tests.train.kit.jobs import config_file, ranks, records, train_here

REGISTRIES: list[Registry[Any]] = [strategies, layouts, memories, optimizers, kinds, sinks, hooks]
SHORT = JOB.replace("steps = 8", "steps = 4")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the files of the page. What they register and import is forgotten afterwards."""
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    with forgotten_afterwards(REGISTRIES):
        yield tmp_path
    for name in EXAMPLES:
        sys.modules.pop(name.removesuffix(".py"), None)
    sys.path[:] = path


def with_other_text(folder: Path, name: str, old: str, new: str) -> None:
    code = (folder / name).read_text()
    assert old in code
    (folder / name).write_text(code.replace(old, new))


def session(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "run" / "run.json").read_text())
    return content["sessions"][-1]  # type: ignore[no-any-return]


def weights(checkpoint: Path | str, part: str = "model.") -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin with the part."""
    stored = sw.open_checkpoint(checkpoint)
    names = [name for name in stored.tensors if name.startswith(part)]
    found = {name: torch.empty(stored.tensors[name].shape) for name in names}
    stored.read(found)
    return {name.removeprefix(part): tensor for name, tensor in found.items()}


def test_a_sink_a_store_a_hook_and_its_metric(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--log.sinks", '["my_sinks:CSV"]', "--checkpoint.folder", f"my_store:Shelf://{folder}/shelf",
        "--run.hooks", '["my_accuracy:Accuracy"]', "--checkpoint.keep_best", "validation_accuracy",
    ]  # fmt: skip
    assert train_here(config_file(folder, SHORT), "--run.dir", "run", *options) == 0
    lines = records(folder / "run")
    rows = (folder / "run" / "losses.csv").read_text().splitlines()
    assert [row.partition(",")[::2] for row in rows] == [
        (str(each["step"]), str(each["loss"])) for each in lines
    ]
    assert not (folder / "run" / "checkpoints").exists()
    assert weights(folder / "shelf" / "run" / "step-4").keys() >= {"tok_embeddings.weight", "norm.weight"}
    # 1 batch of 4 samples with 16 tokens each: the accuracy is a count of 64.
    (_, accuracy), (_, last) = (
        (each["step"], each["validation_metrics"]["accuracy"]) for each in lines if each["step"] % 2 == 0
    )
    assert {accuracy * 64, last * 64} <= {*map(float, range(65))}
    assert f"validation accuracy {last:.4f}" in capsys.readouterr().out


def test_an_optimizer(folder: Path) -> None:
    """Lion changes each weight by its rate, up or down."""
    options = ["--optimizer.name", "my_optimizers:LION", "--optimizer.lr", "0.01", "--optimizer.warmup_steps", "0",
               "--optimizer.schedule", "constant", "--optimizer.weight_decay", "0"]  # fmt: skip
    job = config_file(folder, SHORT.replace("every = 2\n[log]", "every = 1\n[log]"))
    assert train_here(job, "--run.dir", "run", *options) == 0
    three, four = (weights(folder / "run" / "checkpoints" / f"step-{step}") for step in (3, 4))
    for name, before in three.items():
        change = (four[name] - before).abs()
        moved = change > 0
        assert moved.any(), name
        torch.testing.assert_close(change[moved], torch.full_like(change[moved], 0.01), rtol=0, atol=1e-6)


def test_a_kind_of_model(folder: Path) -> None:
    text = re.sub(r"\[model\].*?\[train\]", "[train]", SHORT, flags=re.DOTALL)
    options = ["--model.kind", "my_models:MEANS", "--model.depth", "3", "--model.width", "24"]
    assert train_here(config_file(folder, text), "--run.dir", "run", *options) == 0
    two, four = (weights(folder / "run" / "checkpoints" / f"step-{step}") for step in (2, 4))
    shapes = {name: tuple(each.shape) for name, each in four.items()}
    assert {f"layers.{number}.weight": (24, 24) for number in range(3)}.items() <= shapes.items()
    assert all(not torch.equal(two[name], four[name]) for name in shapes)


@pytest.mark.extensive("runs on two ranks")
def test_a_strategy_a_layout_and_a_memory(folder: Path) -> None:
    options = {
        "strategy": ["my_strategies:ZERO2_INSIDE", "--parallel.replicas", "2"],
        "layout": ["my_layouts:SLICES"],
        "memory": ["my_memories:REUSING"],
    }
    note = "print({}, file=open({!r}, 'a'))\n"
    lease, shape = note.format("slab.nbytes", "leases"), note.format("shape", "shapes")
    with_other_text(folder, "my_memories.py", "        kept = self", f"        {lease}        kept = self")
    with_other_text(folder, "my_layouts.py", "    return math", f"    {shape}    return math")
    job = config_file(folder, SHORT)
    for key, values in options.items():
        arguments = ["train", job, "--run.dir", f"run-{key}", f"--parallel.{key}", *values]
        assert ranks(2, *arguments, folders=[folder] * 2) == [(0, "")] * 2
        content = json.loads((folder / f"run-{key}" / "run.json").read_text())
        assert content["sessions"][0][key] == values[0]
    assert int((folder / "leases").read_text().split()[0]) > 0
    assert "(256, 32)" in (folder / "shapes").read_text()


def test_early_stopping(folder: Path) -> None:
    """A rate that is far too high lets the loss rise."""
    options = ["--run.hooks", '["my_stopping:EarlyStopping"]', "--optimizer.lr", "1", "--optimizer.warmup_steps", "0",
               "--validation.every", "1", "--checkpoint.every", "0", "--train.steps", "40"]  # fmt: skip
    assert train_here(config_file(folder, JOB), "--run.dir", "run", *options) == 0
    losses = [each["validation_loss"] for each in records(folder / "run")]
    best = losses.index(min(losses))
    assert (
        len(losses) == best + 1 + 3 + 1 < 40
    )  # three worse ones, and the step in which all ranks learn of it
    summary = (folder / "run" / "summary.txt").read_text()
    assert f"ended early     no better validation loss than {min(losses):.4f} in 3 validations" in summary


@pytest.mark.extensive("more examples of hooks")
def test_a_moving_average(folder: Path) -> None:
    """The checkpoint holds the average of the weights of all steps."""
    job = config_file(folder, SHORT.replace("every = 2\n[log]", "every = 1\nkeep = 9\n[log]"))
    arguments = ["train", job, "--run.dir", "run", "--run.hooks", '["my_average:MovingAverage"]']
    assert ranks(2, *arguments, folders=[folder] * 2) == [(0, "")] * 2
    steps = [folder / "run" / "checkpoints" / f"step-{step}" for step in range(1, 5)]
    average = weights(steps[0], "extra.hook_MovingAverage.average.")
    assert average
    for step in steps[1:]:
        after = weights(step, "extra.hook_MovingAverage.average.")
        for name, weight in weights(step).items():
            average[name].lerp_(weight, 1 - 0.99)
            torch.testing.assert_close(after[name], average[name], rtol=1e-6, atol=1e-7)


@pytest.mark.extensive("more examples of hooks")
def test_a_schedule(folder: Path) -> None:
    with_other_text(folder, "my_schedule.py", "(step - 1) // 100", "(step - 1) // 2")
    options = ["--run.hooks", '["my_schedule:Steps"]', "--optimizer.lr", "0.004"]
    assert train_here(config_file(folder, SHORT), "--run.dir", "run", *options) == 0
    assert [each["lr"] for each in records(folder / "run")] == [0.004, 0.004, 0.002, 0.002]


@pytest.mark.extensive("more examples of hooks")
def test_a_gradient_hook(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens that are no byte of the text have rows without a gradient. A small limit leaves steps out."""
    assert (
        train_here(
            config_file(folder, SHORT), "--run.dir", "run", "--run.hooks", '["my_gradients:Gradients"]'
        )
        == 0
    )
    zeros = [each["metrics"]["zeros"] for each in records(folder / "run")]
    assert all(0 < each < 0.9 for each in zeros) and f"zeros {zeros[-1]:.4f}" in capsys.readouterr().out
    sys.modules.pop("my_gradients")
    with_other_text(folder, "my_gradients.py", "> 1000", "> 1e-6")
    limit = ["--run.hooks", '["my_gradients:Gradients"]', "--fault.max_skips", "1"]
    assert train_here(config_file(folder, SHORT), "--run.dir", "other", *limit) != 0
    assert "the gradient norm is " in capsys.readouterr().err


@pytest.mark.extensive("more examples of hooks")
def test_epochs(folder: Path) -> None:
    """As many steps as so many epochs have samples, and a hook that sees this number."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    (folder / "my_end.py").write_text(
        "from shardwright.train.extend import TrainerHook\n"
        "class Steps(TrainerHook):\n"
        "    def setup(self, job):\n"
        "        print(job.config.train.steps, file=open('steps', 'a'))\n"
    )
    options = [
        "--data.source",
        "text.txt",
        "--data.validation_fraction",
        "0.5",
        "--run.hooks",
        '["my_end:Steps"]',
    ]
    job = config_file(folder, JOB)
    steps = {}
    for epochs in ("1", "1.5"):
        assert train_here(job, "--run.dir", f"run-{epochs}", *options, "--train.epochs", epochs) == 0
        steps[epochs] = records(folder / f"run-{epochs}")[-1]["step"]
    sys.modules.pop("my_end")
    assert [int(each) for each in (folder / "steps").read_text().split()] == list(steps.values())
    assert steps["1"] < steps["1.5"] <= 1.5 * steps["1"] + 1
