"""Stopping and going on: the same sequence, the same numbers, at any number of ranks and with any engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright import cli
from shardwright.train.config.shapes.presets import PRESETS, RopeScaling
from shardwright.train.launch.resume import changes_in_words
from tests.train.kit.damage import what_is_missing
from tests.train.kit.jobs import (
    config_file,
    finish,
    losses,
    ranks,
    records,
    run_config,
    run_record,
    start,
    steps_in,
    tiny,
    train_here,
    wait_for_steps,
)


def test_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(tmp_path: Path, plain_run: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    assert train_here(config, "--run.dir", folder, "--train.steps", "5") == 0
    assert train_here(config, "--resume", folder) == 0
    assert losses(folder) == losses(plain_run)
    sessions = run_record(folder)["sessions"]
    assert [(s["from_step"], s["to_step"], s["status"]) for s in sessions] == [
        (0, 5, "finished"),
        (5, 8, "finished"),
    ]


def test_resume_on_the_same_and_on_another_number_of_ranks(
    tmp_path: Path, plain_run: Path, sharded_run: Path
) -> None:
    """All pairs of engines are in test_parallel."""
    config, broken, shrunk, grown = (
        config_file(tmp_path),
        *(tmp_path / name for name in ("broken", "shrunk", "grown")),
    )
    two_ranks, well = ("train", config, "--parallel.engine", "shardwright"), [(0, ""), (0, "")]
    assert ranks(2, *two_ranks, "--run.dir", broken, "--train.steps", "4") == well
    shutil.copytree(broken, shrunk)
    assert ranks(2, *two_ranks, "--resume", broken) == well
    assert losses(broken) == losses(sharded_run)
    assert train_here(config, "--resume", shrunk) == 0
    assert losses(shrunk) == pytest.approx(losses(plain_run), rel=1e-6)
    assert train_here(config, "--run.dir", grown, "--train.steps", "4") == 0
    assert ranks(2, *two_ranks, "--resume", grown) == well
    assert losses(grown) == pytest.approx(losses(plain_run), rel=1e-6)


@pytest.mark.extensive("jobs of processes of their own; one rank's stays")
def test_signal_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    arguments = ("--parallel.engine", "shardwright", "--checkpoint.every", "0", "--validation.every", "0")
    job = start("train", config, *arguments, "--run.dir", folder, "--nproc", "2", "--train.steps", "100000")
    wait_for_steps(folder, 3)
    job.send_signal(signal.SIGTERM)
    status, out, err = finish(job, timeout=30)
    assert (status, err) == (143, "") and f"train --resume {folder} --nproc 2" in out
    done = steps_in(folder / "checkpoints")[0]
    assert len(records(folder)) == done
    assert run_record(folder)["status"] == "interrupted"
    # The command works as it was printed, without the configuration's file.
    command = out.partition("to continue:\n")[2].splitlines()[0]
    variables = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    again = subprocess.run(
        f"{command} --train.steps {done + 1}",
        shell=True,
        env=variables,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (again.returncode, again.stderr) == (0, "") and len(records(folder)) == done + 1
    assert f"train.steps  100000 -> {done + 1}" in again.stdout
    assert train_here(config, "--resume", folder, "--train.steps", str(done + 2)) == 0
    assert [record["step"] for record in records(folder)] == list(range(1, done + 3))


@pytest.mark.extensive("test_signals has the signals")
def test_signal_ends_a_run_of_one_rank_too(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    job = start("train", config, "--run.dir", folder, "--train.steps", "100000", "--validation.every", "0")
    wait_for_steps(folder, 3)
    job.send_signal(signal.SIGINT)
    status, out, err = finish(job, timeout=30)
    assert (status, err) == (130, "") and "stopped by SIGINT" in out
    assert what_is_missing(folder / "checkpoints" / f"step-{len(records(folder))}") is None


def test_cut_off_checkpoint_is_passed_over(
    tmp_path: Path, plain_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    assert train_here(config, "--run.dir", folder, "--train.steps", "6", "--checkpoint.every", "2") == 0
    newest = folder / "checkpoints" / "step-6"
    data = newest / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])  # as if the machine had stopped while the disk was writing
    assert train_here(config, "--resume", folder) == 0
    assert f"{newest} is damaged" in capsys.readouterr().out
    assert losses(folder) == losses(plain_run)  # steps 5 and 6 again, recorded once
    assert what_is_missing(folder / "checkpoints" / "step-8") is None


def test_broken_checkpoints_do_not_count_among_those_kept(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    every = ("--checkpoint.every", "2", "--checkpoint.keep", "2", "--validation.every", "0")
    assert train_here(config, "--run.dir", folder, "--train.steps", "8", *every) == 0
    checkpoints = folder / "checkpoints"
    shutil.copytree(checkpoints / "step-8", checkpoints / "step-10")
    for step in (8, 10):
        (checkpoints / f"step-{step}" / "__0_0.distcp").unlink()
    assert train_here(config, "--resume", folder, "--train.steps", "7", *every) == 0
    assert steps_in(checkpoints) == [7, 6]
    assert all(what_is_missing(checkpoints / f"step-{step}") is None for step in (7, 6))


def test_resume_from_another_folder_by_the_configuration_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder, elsewhere = config_file(tmp_path), tmp_path / "run", tmp_path / "elsewhere"
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    source = ("--data.source", "text.txt")
    assert train_here(config, *source, "--run.dir", folder, "--train.steps", "2") == 0
    assert train_here(config, *source, "--resume", folder, "--train.steps", "3") == 0
    monkeypatch.chdir(elsewhere)
    kept = folder / "config.toml"
    assert train_here(kept, "--resume", folder, "--train.steps", "4") == 0
    assert len(records(folder)) == 4


def test_changed_preset_does_not_change_an_old_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    assert train_here(config, "--run.dir", folder, "--train.steps", "2") == 0
    before = run_config(folder).model.shape()
    monkeypatch.setitem(
        PRESETS, "debug", replace(PRESETS["debug"], rope_theta=1.0, rope_scaling=RopeScaling())
    )
    assert run_config(folder).model.shape() == before
    assert train_here(config, "--resume", folder) == 2
    assert "expected model.rope_theta = 10000.0 as in" in capsys.readouterr().err


def test_interrupted_save_is_no_checkpoint(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    assert train_here(config, "--run.dir", folder, "--train.steps", "2") == 0
    leftover = folder / "checkpoints" / ".step-3.partial"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    assert steps_in(folder / "checkpoints") == [2]
    assert train_here(config, "--resume", folder, "--train.steps", "4") == 0
    assert not leftover.exists()


def test_resume_without_a_name_takes_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_file(tmp_path)
    for _ in range(2):  # most likely within one second: the names still differ
        assert train_here(config, "--train.steps", "2") == 0
    older, newer = sorted(Path("runs").iterdir(), key=lambda path: (len(path.name), path.name))
    assert train_here(config, "--resume", "--train.steps", "3") == 0
    assert (len(records(older)), len(records(newer))) == (2, 3)


@pytest.mark.parametrize(("schedule", "lines"), [("cosine", 1), ("constant", 0)])
def test_a_new_last_step_changes_the_schedule(schedule: str, lines: int) -> None:
    before, after = (tiny(train={"steps": n}, optimizer={"schedule": schedule}) for n in (400, 150))
    words = changes_in_words(before, after)
    assert words is not None and words.count("schedule of the learning rate now ends with") == lines


def test_changed_settings_are_printed_and_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    assert train_here(config, "--run.dir", folder, "--train.steps", "2") == 0
    assert cli.main(["train", "--resume", str(folder), "--train.steps", "2"]) == 2  # nothing differs
    assert "differ from the saved run" not in capsys.readouterr().out
    changed = ("--optimizer.lr", "5e-3", "--optimizer.betas", "[0.8, 0.9]", "--optimizer.weight_decay", "0.0")
    assert train_here(config, "--resume", folder, "--train.steps", "4", *changed) == 0
    block = capsys.readouterr().out.partition("settings that differ from the saved run (saved -> now)")[2]
    assert block.splitlines()[:5] == [
        "; the new ones are used:",
        "  train.steps             2 -> 4",
        "  optimizer.lr            0.01 -> 0.005",
        "  optimizer.betas         [0.9, 0.95] -> [0.8, 0.9]",
        "  optimizer.weight_decay  0.1 -> 0.0",
    ]
    assert [record["lr"] for record in records(folder)] == [0.005, 0.01, 0.005, 0.005]
    # Without CONFIG.toml the run's own configuration counts, as it was last changed.
    assert cli.main(["train", "--resume", str(folder), "--train.steps", "5"]) == 0
    assert "  train.steps  4 -> 5\n" in capsys.readouterr().out
    assert records(folder)[-1]["lr"] == 0.005
    assert cli.main(["train", "--resume", str(tmp_path / "nowhere")]) == 2
    assert "--resume: expected the folder of a run, found no such folder at" in capsys.readouterr().err


@pytest.mark.extensive("jobs of processes of their own")
def test_a_run_continues_with_appended_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From its command line, on one and on two ranks: refused without data.appended, and used with it."""
    data = tmp_path / "data"
    data.mkdir()

    def append(name: str, count: int) -> None:
        with open(data / name, "a") as stream:
            stream.writelines(
                f'{{"text": "{name} document {number} {"word " * 12}"}}\n' for number in range(count)
            )

    append("a.jsonl", 40)
    append("b.jsonl", 40)
    config, folder = config_file(tmp_path), tmp_path / "run"
    where = ("--data.source", f"{data}/*.jsonl", "--data.packing", "best_fit")
    assert train_here(config, *where, "--run.dir", folder, "--train.steps", "3") == 0
    saved = json.loads((folder / "data.json").read_text())
    append("a.jsonl", 60)
    append("c.jsonl", 40)
    capsys.readouterr()
    assert train_here(config, *where, "--resume", folder, "--train.steps", "5") == 2
    error = capsys.readouterr().err
    assert "found 100 more; set data.appended to true" in error and error.count("\n") == 1
    assert json.loads((folder / "data.json").read_text()) == saved
    where = (*where, "--data.appended", "true")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert train_here(config, *where, "--resume", folder, "--train.steps", "20") == 0
    out = capsys.readouterr().out
    assert re.search(
        r"appended to .*: 100 documents of [0-9,]+ tokens: \d+ samples after the others of its epoch 1", out
    )
    assert len(json.loads((folder / "data.json").read_text())["sources"][0]["parts"]) == 2
    # On two ranks, with a stop and a resume after the growth: the same losses, so the same samples.
    engine = ("--parallel.engine", "ddp")
    two = ranks(2, "train", config, *engine, *where, "--resume", copy, "--train.steps", "6")
    assert two == [(0, ""), (0, "")]
    assert train_here(config, *where, "--resume", copy, "--train.steps", "20") == 0
    assert losses(copy) == pytest.approx(losses(folder), rel=1e-5)
    assert len(losses(copy)) == 20
    (data / "b.jsonl").write_text("")
    append("b.jsonl", 39)
    capsys.readouterr()
    assert train_here(config, *where, "--resume", folder, "--train.steps", "25") == 2
    assert f"{data}/b.jsonl no longer begins with the" in capsys.readouterr().err


def test_a_list_of_files_may_get_new_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("z.txt", "a.txt")]
    for path in paths:
        path.write_text(f"{path.name} has a text of its own. " * 60)
    config, folder = config_file(tmp_path), tmp_path / "run"
    first, both = json.dumps([str(paths[0])]), json.dumps([str(path) for path in paths])
    assert train_here(config, "--data.source", first, "--run.dir", folder, "--train.steps", "2") == 0
    resumed = ("--resume", folder, "--train.steps", "4", "--data.source", both)
    assert train_here(config, *resumed) == 2
    assert "expected data.source = " in capsys.readouterr().err
    assert train_here(config, *resumed, "--data.appended", "true") == 0
    assert "appended to" in capsys.readouterr().out


def test_a_damaged_record_of_the_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    assert train_here(config, "--run.dir", folder, "--train.steps", "1") == 0
    whole = json.loads((folder / "data.json").read_text())
    source = whole["sources"][0]
    for content in (
        "{", "[]", "{}", '{"sources": [], "validation": ""}', '{"sources": [{}], "validation": ""}',
        json.dumps({**whole, "sources": [{**source, "epochs": [1]}]}),
        json.dumps({**whole, "sources": [{**source, "files": [[1]]}]}),
    ):  # fmt: skip
        (folder / "data.json").write_text(content)
        capsys.readouterr()
        assert train_here(config, "--resume", folder, "--train.steps", "2") == 2
        error = capsys.readouterr().err
        assert "data.json: expected the documents of the run, found" in error and error.count("\n") == 1
    (folder / "data.json").unlink()
    assert train_here(config, "--resume", folder, "--train.steps", "2") == 2
    assert "data.json: expected the documents of the run, found FileNotFoundError" in capsys.readouterr().err


@pytest.mark.extensive("runs and their resumes")
def test_other_text_for_validation_alone_is_said_and_a_split_stays_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(f"{name} validates. " * 80)
    config, folder, split = config_file(tmp_path), tmp_path / "run", tmp_path / "split"
    one, two = (("--data.validation_source", tmp_path / name) for name in ("one.txt", "two.txt"))
    assert train_here(config, *one, "--run.dir", folder, "--train.steps", "4") == 0
    out = capsys.readouterr().out
    assert re.search(r"  validation: \S+one\.txt +1 +1,520", out)
    assert re.search(r"validation +\d+\.\d+ on the validation source", out)
    assert train_here(config, *one, "--resume", folder, "--train.steps", "5") == 0
    assert "do not compare" not in capsys.readouterr().out
    assert train_here(config, *two, "--resume", folder, "--train.steps", "6") == 0
    assert "the validation source differs" in capsys.readouterr().out
    assert train_here(config, "--run.dir", split, "--train.steps", "1") == 0
    assert train_here(config, *one, "--resume", split, "--train.steps", "2") == 2
    assert "expected data.validation_source = " in capsys.readouterr().err
