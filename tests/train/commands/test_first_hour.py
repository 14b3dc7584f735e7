"""The first hour of a new user: help, near names, words of the start, the vocabulary, memory."""

from __future__ import annotations

import dataclasses
import sys
import time
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import shardwright as sw
from shardwright import cli
from shardwright.cli.train import USUAL
from shardwright.engine.memory import Plan
from shardwright.train.config import Config
from shardwright.train.config.keys import keys
from shardwright.train.extend import StepRecord
from shardwright.train.report import progress
from shardwright.train.report.plan_picture import outside_in_words, plan_figure
from shardwright.train.report.progress import Start
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.account.memory_report import REPORTED, MemoryReporter
from shardwright.train.step.account.notices import first_loss_in_words
from shardwright.train.step.evaluation import validate
from tests.support import multirank
from tests.train.data.samples import save_tokenizer, write_jsonl
from tests.train.kit.jobs import config_file, tiny, train_here, trainer
from tests.train.kit.parallel import take_steps


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err.strip()


def test_help_begins_with_the_usual_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(USUAL) <= {key.path for key in keys()} and len(USUAL) == 10
    status, out, _ = said(capsys, "train", "--help")
    assert status == 0 and out.index("usual keys:") < out.index("configuration keys:")
    usual = out[out.index("usual keys:") : out.index("configuration keys:")]
    assert [path for path in USUAL if f"  --{path} " in usual] == list(USUAL)
    assert all(key.title in out for key in keys())


@pytest.mark.extensive("each section", but=("train*", "parallel*", "*0", "*1"))
@pytest.mark.parametrize("section", Config.model_fields)
def test_help_of_a_section(capsys: pytest.CaptureFixture[str], section: str) -> None:
    for word in ("--help", "-h"):
        status, out, _ = said(capsys, "train", word, section)
        assert status == 0 and out.startswith(f"[{section}] ")
        titles = [line.split("  ")[1] for line in out.splitlines() if line.startswith(("  --", "  [["))]
        assert titles == [key.title for key in keys() if key.path.partition(".")[0] == section]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--help", "chekpoint"), "expected a section, found 'chekpoint'; did you mean checkpoint?"),
        (("train", "--help", "xyz"), "the sections are run, model, data"),
        (("train", "on.toml"), "; did you mean own.toml or a.toml?"),
        (("train", "twice.toml"), "twice.toml: expected each key once, found steps again in line 3; remove one"),
        (
            ("train", "own.toml", "--resume"),
            "found none; pass the folder of a run that was started with run.dir; runs in runs: runs/a",
        ),
        (("train", "--resume", "runs/b"), "found no such folder at runs/b; runs in runs: runs/a"),
        (("report", "b"), "found no such folder; runs in runs: runs/a"),
        (("inspect", "runs/a/checkpoints/step-9"), "checkpoints in runs/a/checkpoints: step-20, step-3"),
        (("convert", "runs/a/checkpoints/step-9", "x.pt"), "checkpoints in runs/a/checkpoints: step-20, step-3"),
        (("train", "own.toml", "--data.source", "raws.jsonl"), "did you mean rows.jsonl?"),
        (("train", "own.toml", "--data.source", "mi.txt"), "did you mean my.txt?"),
        (("train", "own.toml", "--profile.steps", "[1,", "2]"), "quotes: --profile.steps '[1, 2]'"),
        (("train", "own.toml", "--run.hooks", "X:Y"), "each an import path (package.module:NAME), found"),
        (("train", "own.toml", "--optimizer.schedule", "Cosine"), "did you mean cosine?"),
        (("train", "own.toml", "--train.compile", "false"), "did you mean none?"),
        (("train", "sub/own.tml"), "sub/own.tml: expected a configuration file, found nothing there"),
        (("train", "own.toml", "--model.preset", "8b"), "found '8b'; did you mean '8B'?"),
        (("train", "own.toml", "--model.preset", "150m"), "found '150m'; did you mean '150M'?"),
        (("train", "own.toml", "--log.sinks", "comet"), "found \"comet\" (a string); there is no sink 'comet'"),
        (("train", "own.toml", "--log.sinks", "wand"), 'write ["wandb"]'),
        (("train", "own.toml", "--log.sinks", "wandb"), 'write ["wandb"]'),
        (
            ("train", "own.toml", "--data.source", "rows.jsonl"),
            "data.text_key: expected key 'text' in each row, found only 'content', 'id' in line 1 of",
        ),
        (("train", "own.toml", "--data.source", "near.jsonl"), "set data.text_key = 'texts'"),
        (("train", "own.toml", "--data.source", "near.jsonl", "--data.kind", "completions"), "set data.prompt_key to"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_way_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    config_file(tmp_path).rename("own.toml")
    (tmp_path / "a.toml").touch()
    (tmp_path / "twice.toml").write_text("[train]\nsteps = 2\nsteps = 3\n")
    (tmp_path / "my.txt").write_text("a b c")
    for step in (3, 20):
        (tmp_path / "runs" / "a" / "checkpoints" / f"step-{step}").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "run.json").touch()
    write_jsonl(tmp_path / "rows.jsonl", [{"content": "a b c", "id": 3}] * 9)
    write_jsonl(tmp_path / "near.jsonl", [{"texts": "a b c", "id": 3}] * 9)
    status, _, err = said(capsys, *arguments)
    assert status == 2 and words in err.splitlines()[-1] and err.startswith("error: ")


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_of_the_start_repeat_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    start = Start()
    start.begin("reading the data")
    time.sleep(0.5)
    start.doing("building the model")
    time.sleep(0.5)
    start.end()
    lines = [line.rpartition(" (")[0] for line in capsys.readouterr().out.splitlines()]
    if terminal:
        assert lines.count("reading the data") > 2 and lines.count("building the model") > 2
    else:
        assert lines == ["reading the data", "building the model"]


def test_pretrained_weights_are_not_called_random() -> None:
    assert "random weights" in (first_loss_in_words(6.0, 256) or "").lower()
    for loss in (6.0, 60.0):
        note = first_loss_in_words(loss, 256, pretrained=True)
        assert note is not None and "random" not in note.lower() and "data.tokenizer" in note


@pytest.mark.extensive("a run")
def test_the_vocabulary_follows_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    files = save_tokenizer(tmp_path / "tokenizer")
    job = config_file(tmp_path, tiny(train={"steps": 1}, validation={"every": 0}).to_toml())
    text = tmp_path / "text.txt"
    text.write_text("some words and more of them. " * 200)
    options = ("--data.source", text, "--data.cache", tmp_path / "cache", "--data.tokenizer", files)
    folder = tmp_path / "run"
    assert train_here(job, *options, "--run.dir", folder) == 0
    assert tomllib.loads((folder / "config.toml").read_text())["model"]["vocab_size"] == 700
    assert train_here("--resume", folder, "--train.steps", "2") == 0  # type: ignore[arg-type]
    assert train_here(job, "--resume", folder, *options, "--train.steps", "3") == 0
    assert train_here(job, *options, "--model.vocab_size", "704", "--run.dir", tmp_path / "larger") == 0
    capsys.readouterr()
    assert train_here(job, *options, "--model.vocab_size", "300", "--run.dir", tmp_path / "small") == 2
    assert "model.vocab_size: expected at least the tokenizer's 700, found 300" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()
    assert train_here(job, "--run.dir", tmp_path / "bytes", "--model.preset", "debug") == 0
    assert tomllib.loads((tmp_path / "bytes/config.toml").read_text())["model"]["vocab_size"] == 256


ENGINES: list[dict[str, Any]] = [
    {"strategy": "zero3"},
    {"strategy": "zero3", "reshard_after_forward": "always"},
    {"strategy": "zero3", "reshard_after_forward": "never"},
    {"strategy": "zero3", "layout": "ragged"},
    {"strategy": "zero3", "layout": "element"},
    {"strategy": "zero2"},
    {"strategy": "zero1"},
    {"strategy": "ddp"},
    {"strategy": "zero3", "prefetch": 0},
    {"strategy": "zero3", "prefetch": 2},
    {"strategy": "zero3", "param_dtype": "bfloat16"},
    {"strategy": "zero3", "memory": "max_pool"},
]


@pytest.mark.extensive("each engine", but=("engine4-*",))
@multirank(2)
@pytest.mark.parametrize("accumulate", ["communicate", "hold"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_validation_keeps_to_the_plan(
    rank: int, world_size: int, engine: dict[str, Any], accumulate: str
) -> None:
    """Validations of several passes between steps, the first one before or after the plan is made."""
    for first in (1, 3):
        config = tiny(
            parallel={"engine": "shardwright", "memory": "arena", **engine},
            train={"accumulate": accumulate, "global_batch": 8, "micro_batch": 2, "seq_len": 8},
            validation={"batches": 2},
        )
        job = trainer(config, rank, world_size)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for step in range(1, 5):
                take_steps(job, 1)
                if step >= first:
                    validate(job)
        assert sw.memory_report(job.model).deviations == (), (engine, first)
        job.close()


def test_report_and_picture_name_the_same_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that came after the report."""
    deviations = (("layers.0", "parameters", "it is not in the plan", 3), ("norm", "sum", "why not", 1))
    words = outside_in_words(deviations)
    assert words.startswith("4 leases outside the plan") and "parameters of unit 'layers.0'" in words
    figure = plan_figure(Plan((), (), 0, 0), "job", "arena", 0, words)
    assert "4 leases outside the plan" in figure.axes[0].get_title()
    assert outside_in_words(()) == ""

    class Job:
        config = tiny(parallel={"engine": "shardwright"})
        model = optimizer = None
        world = SimpleNamespace(is_first=True)

    report = sw.MemoryReport(
        rank=0, shards=1, rest=0, buffers=0, gradients=0, optimizer=0, memory="arena", leased={}, peak=4,
        peak_at=("layers.0", "parameters"), at_peak={}, plan=Plan((), (), 0, 0), leases=(5, 0), deviations=(),
    )  # fmt: skip
    reports = [report, report, dataclasses.replace(report, deviations=deviations)]
    reports.append(reports[-1])
    monkeypatch.setattr(sw, "memory_report", lambda *arguments: reports.pop(0))
    lines: list[str] = []
    job: Any = Job()
    folder, reporter = RunFolder(tmp_path), Reporter([])
    monkeypatch.setattr(reporter, "say", lines.append)
    memory, record = (
        MemoryReporter(job, folder, reporter),
        cast(StepRecord, SimpleNamespace(memory_reserved=0)),
    )
    memory.after_last_step()
    assert not lines
    for _ in range(REPORTED + 2):
        memory.after_step(record)
    assert len(lines) == 1 and "outside" not in lines[0]
    memory.after_last_step()
    assert len(lines) == 1
    memory.after_last_step()
    assert len(lines) == 2 and words in lines[1]
    assert (
        "Outside: parameters of unit 'layers.0', 3x: it is not in the plan." in folder.memory_file.read_text()
    )
    assert folder.plan_picture.exists()
