"""Figures that are nan or infinite: a warning names each once with its ranks, files stay strict JSON, a run goes on."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import cli
from shardwright.train.step.numerics.not_finite import marks, wrong_ranks
from tests.support.strict_json import WRONG, strict
from tests.train.kit.hooks import JOB
from tests.train.kit.jobs import config_file, ranks, steps_in, train_here

OWN = '''
import math

import torch
from shardwright.train.extend import TrainerHook


class Wrong(TrainerHook):
    """Metrics that are not finite at some steps on some ranks."""

    step_metrics = ("fine", "one", "every", "count", "sudden")
    validation_metrics = ("rows", "last")

    def setup(self, job):
        self.job = job

    def before_step(self, step):
        self.step = step

    def metrics(self, step):
        last = self.job.rank == self.job.ranks - 1
        return {
            "fine": (float(step), 1),
            "one": (torch.tensor(math.nan if last and step >= 3 else 1.0), 1),
            "every": (math.inf, torch.ones(())),
            "count": (1.0, math.nan if self.job.rank == 0 and step == 4 else 1),
            "sudden": (-math.inf if step == 8 else 0.0, 1),
        }

    def validate(self, logits, targets):
        last = self.job.rank == self.job.ranks - 1
        return {"rows": (len(targets), 1), "last": (math.nan if last and self.step >= 6 else float(self.step), 1)}


class Losses(TrainerHook):
    """Logits of validations become nan from step 4 on."""

    def setup(self, job):
        self.step = 0
        job.model.register_forward_hook(self.change)

    def before_step(self, step):
        self.step = step

    def change(self, module, arguments, logits):
        return logits * math.nan if self.step >= 4 and not module.training else logits


class Rates(TrainerHook):
    def setup(self, job):
        self.job = job

    def before_step(self, step):
        if step == 3:
            self.job.optimizer.param_groups[-1]["lr"] = math.nan


class Never(TrainerHook):
    """A metric that is never finite."""

    validation_metrics = ("odd",)

    def validate(self, logits, targets):
        return {"odd": (math.nan, 1)}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "wrong.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.modules.pop("wrong", None)
    sys.path[:] = path


def train(
    folder: Path, count: int, *options: str, hooks: list[str], run: str = "run"
) -> list[tuple[int | None, str]]:
    job = config_file(folder, JOB)
    arguments = [str(job), "--run.dir", run, "--run.hooks", json.dumps(hooks), *options]
    if count == 1:
        return [(train_here(job, *arguments[1:]), "")]
    return ranks(count, "train", *arguments, folders=[folder] * count)


def read(run: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.extensive("a run on each number of ranks", but=("2",))
@pytest.mark.parametrize("count", [1, 2])
def test_metrics_that_are_not_finite(folder: Path, count: int, capfd: pytest.CaptureFixture[str]) -> None:
    best = ("--checkpoint.keep_best", "validation_last", "--checkpoint.keep", "1")
    assert [status for status, _ in train(folder, count, *best, hooks=["wrong:Wrong"])] == [0] * count
    last, first, everyone = ("", "", "") if count == 1 else (" (rank 1)", " (rank 0)", " (all ranks)")
    out = capfd.readouterr().out
    if count == 1:  # forked ranks print into files of the launcher
        warnings = re.findall(r"warning: (.*? is \S+ in step .*?)\. metrics.jsonl has null", out)
        assert len(warnings) == len(set(warnings)) == 5
        assert re.search(r"step 3/8 .* one nan ", out)
    lines = read(folder / "run")
    assert [line["metrics"]["fine"] for line in lines] == [float(step) for step in range(1, 9)]
    nulls = {
        name: [line["step"] for line in lines if line["metrics"][name] is None]
        for name in ("one", "every", "count", "sudden")
    }
    assert nulls == {"one": [3, 4, 5, 6, 7, 8], "every": [*range(1, 9)], "count": [4], "sudden": [8]}
    assert lines[7]["not_finite"] == {
        "metrics": {"one": "nan", "every": "inf", "sudden": "-inf"}, "validation_metrics": {"last": "nan"},
    }  # fmt: skip
    summary = (folder / "run" / "summary.txt").read_text()
    for text in (
        f"one is nan in step 3{last}",
        f"every is inf in step 1{everyone}",
        f"count is nan in step 4{first}",
        f"sudden is -inf in step 8{everyone}",
        f"validation last is nan in step 6{last}",
    ):
        assert summary.count(f"warning         {text}\n") == 1, (text, summary)
    results = strict((folder / "run" / "run.json").read_text())["results"]
    assert results["metrics"]["one"] is None and results["best"] == {"step": 2, "validation_last": 2.0}
    assert steps_in(folder / "run" / "checkpoints") == [8, 2]
    assert re.search(r"  one +nan\n", summary)
    # A resume reads what was written, and a comparison, too.
    assert cli.main(["train", "--resume", "run", "--train.steps", "9"]) == 0
    assert [line["step"] for line in read(folder / "run")] == [*range(1, 10)]
    assert train(folder, 1, hooks=[], run="plain")[0][0] == 0
    assert cli.main(["compare", "run", "plain"]) == 0
    figures = strict((folder / "run" / "compare.json").read_text())["runs"]
    assert figures[0]["metrics"]["one"] is None and figures[0]["metrics"]["fine"] == 9.0
    assert " nan " in capfd.readouterr().out


def test_a_validation_loss_that_is_not_finite(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "wrong.py").write_text(OWN)
    best = ("--checkpoint.keep_best", "validation_loss", "--checkpoint.keep", "1")
    assert train(folder, 1, *best, hooks=["wrong:Losses"])[0][0] == 0
    out = capfd.readouterr().out
    assert out.count("warning: validation loss is nan in step 4") == 1
    assert re.search(r"step 6/8 .* validation nan ", out)
    summary = (folder / "run" / "summary.txt").read_text()
    assert re.search(r"validation +nan on ", summary)  # not the last finite one
    assert strict((folder / "run" / "run.json").read_text())["results"]["validation_loss"] is None
    assert steps_in(folder / "run" / "checkpoints") == [8, 2]


def test_no_checkpoint_is_the_best_if_no_value_is_finite(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    best = ("--checkpoint.keep_best", "validation_odd", "--checkpoint.keep", "1")
    assert train(folder, 1, *best, hooks=["wrong:Never"])[0][0] == 0
    text = "no checkpoint is the best: validation_odd is not finite in any step that has one"
    out = capfd.readouterr().out
    assert out.count(f"warning: checkpoint.keep_best: {text}\n") == 1
    assert "best " not in out.replace(text, "") and f"warning         {text}\n" in out
    assert "best" not in strict((folder / "run" / "run.json").read_text())["results"]
    assert steps_in(folder / "run" / "checkpoints") == [8]


def test_a_rate_that_is_not_finite_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(folder, 1, hooks=["wrong:Rates"])[0][0] == 2
    err = capfd.readouterr().err
    assert err.startswith(
        "error: run.hooks: expected a finite learning rate for step 3, found nan in group 1 of "
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("value", WRONG, ids=str)
def test_ranks_of_wrong_parts(size: int, value: float) -> None:
    """All sets of ranks, in one row for each figure."""
    names = [str(number) for number in range(2**size)]
    rows = []
    for rank in range(size):
        parts = torch.tensor([[1.0, value if number >> rank & 1 else 1.0] for number in range(2**size)])
        rows.append(marks(parts.double(), rank))
    found = wrong_ranks(names, torch.stack(rows).sum(0).tolist(), size)
    for number, name in enumerate(names):
        wrong = [rank for rank in range(size) if number >> rank & 1]
        if not wrong:
            assert name not in found
        elif len(wrong) == size:
            assert found[name] == ("all ranks" if size > 1 else "")
        else:
            assert found[name] == (f"rank {wrong[0]}" if len(wrong) == 1 else f"{len(wrong)} of {size} ranks")
