"""Mistakes and accidents: one clear line and status 2 for what the user can correct, the culprit named for the rest."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardwright import cli
from shardwright.train.errors import UserError
from shardwright.train.launch.job_end import Complaint
from shardwright.train.launch.judgement import EndOfRanks, Evidence, culprit
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.metrics import recorded_step
from shardwright.train.run.record import RunRecord, repair_record
from shardwright.train.run.writing import write_text
from shardwright.train.step import session
from shardwright.train.step.trainer import Trainer
from tests.train.kit.damage import what_is_missing
from tests.train.kit.jobs import (
    config_file,
    finish,
    losses,
    rank_process,
    ranks,
    read_exit,
    run,
    run_record,
    start,
    steps_in,
    train_here,
    wait_for,
    wait_for_steps,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps; copied by the tests that damage it."""
    folder = tmp_path_factory.mktemp("finished")
    assert train_here(config_file(folder), "--run.dir", folder / "run", "--train.steps", "2") == 0
    return folder / "run"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line with which a command is refused."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and "Traceback" not in shown.err
    return shown.err


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_file(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short\n")
    (tmp_path / "file").write_text("")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "long.jsonl").write_text("9" * 10_000)
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        (("--nproc", "2"), "parallel.engine: the engine 'none' runs on exactly 1 rank, found 2"),
        (
            ("--nproc", "3", "--parallel.engine", "fsdp2"),
            "train.global_batch: expected a multiple of 3 ranks",
        ),
        (("--data.source", tmp_path / "missing.txt"), "found nothing at"),
        (("--data.source", tmp_path / "empty.txt"), "expected data, found an empty file at"),
        (("--data.source", tmp_path / "short.txt"), "train.seq_len: expected at most"),
        (("--parallel.param_dtype", "float16"), "parallel.param_dtype: expected one of float32, bfloat16"),
        (
            ("--data.source", tmp_path / "deep.jsonl"),
            "nesting that is too deep or a number that is too long in line 1",
        ),
        (
            ("--data.source", tmp_path / "long.jsonl"),
            "nesting that is too deep or a number that is too long in line 1",
        ),
        (("--model.dim", str(2**40)), "model: expected a model that fits into the"),
        (("--model.max_seq_len", str(2**50)), "choose a smaller preset"),
        (("--train.global_batch", str(2**40)), "train.global_batch: expected at most 1000 times the"),
        (("--parallel.reshard_after_forward", "never"), "engine none, which shards nothing"),
        (("--run.dir", tmp_path / "file"), "run.dir: expected a folder, found a file at"),
        (("--run.dir", tmp_path / "file" / "below"), "cannot write"),
        (("--run.dir", tmp_path / ("long" * 100)), "cannot write"),
        (("--run.dir", "/proc/shardwright"), "cannot write"),
        (("--resume", tmp_path / "nowhere"), "--resume: expected the folder of a run"),
        (("--model.vocab_size", "100"), "model.vocab_size"),
        (
            ("--parallel.engine", "shardwright", "--train.cuda_graph", "true"),
            "train.cuda_graph: expected false on the CPU, found true; it needs a CUDA device",
        ),
        (("--train.cuda_graph", "true"), "only steps of the engine shardwright can be captured"),
        (("--train.memory_snapshot", "[2]"), "train.memory_snapshot: expected [] on the CPU, found [2]"),
        (("--train.memory_snapshot", "[0]"), "train.memory_snapshot"),
    ]
    for number, (arguments, expected) in enumerate(cases):
        given = ("--run.dir", tmp_path / f"run{number}") if "--run.dir" not in arguments else ()
        assert expected in refused(capsys, "train", config, *given, *arguments), arguments
        # Nothing is left behind that would stand in the way of the corrected command.
        assert not (tmp_path / f"run{number}").exists(), arguments


def test_a_failure_before_the_run_begins_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(trainer: Trainer) -> None:
        raise RuntimeError("of the machine")

    monkeypatch.setattr(session, "check_model", fails)
    assert train_here(config_file(tmp_path), "--run.dir", tmp_path / "run") == 1
    assert "error: RuntimeError: of the machine (add --debug" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_error_is_reported_although_the_record_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Trainer, *arguments: Any) -> None:
        raise RuntimeError("of the machine")

    def cannot_write(self: RunRecord, *arguments: Any) -> None:
        raise UserError("run.json: cannot write: no space left")

    monkeypatch.setattr(Trainer, "train_step", fails)
    monkeypatch.setattr(RunRecord, "close", cannot_write)
    assert train_here(config_file(tmp_path), "--run.dir", tmp_path / "run") == 1
    assert "error: RuntimeError: of the machine" in capsys.readouterr().err


def test_ranks_may_replace_a_file_at_the_same_time(tmp_path: Path) -> None:
    """As run.json, when ranks of a job fail at one moment."""
    path, texts = tmp_path / "run.json", [str(number) * 100_000 for number in range(4)]
    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(lambda text: [write_text(path, text) for _ in range(50)], texts))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SHARDWRIGHT_TIMEOUT": "soon"}, "SHARDWRIGHT_TIMEOUT: expected seconds from 0.001 to 1e9, found 'soon'"),
        ({"SHARDWRIGHT_TIMEOUT": "0"}, "SHARDWRIGHT_TIMEOUT"),
        ({"SHARDWRIGHT_TIMEOUT": "nan"}, "SHARDWRIGHT_TIMEOUT"),
        ({"SHARDWRIGHT_TIMEOUT": "1e300"}, "SHARDWRIGHT_TIMEOUT"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK: expected an integer from 0 to 1, found 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected an integer from 0 to 1, found '2'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE: expected an integer >= 1, found ''"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR: expected a value together with RANK and WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "MASTER_PORT"),
    ],
)  # fmt: skip
def test_bad_environment_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    expected: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert expected in refused(capsys, "train", config_file(tmp_path), "--run.dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_run_is_never_overwritten(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    config = finished.parent / "tiny.toml"
    assert "found one in" in refused(capsys, "train", config, "--run.dir", finished)
    assert "train.steps: expected more than 2, the steps" in refused(
        capsys, "train", config, "--resume", finished, "--train.steps", "2"
    )
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_resume_as_another_job_names_the_key(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = finished.parent / "tiny.toml"
    changes = {
        "model.dim": ("64", "32"),
        "model.tied_embeddings": ("true", "False"),
        "data.validation_fraction": ("0.1", "0.05"),
        "run.seed": ("5", "0"),
        "train.seq_len": ("16", "32"),
    }
    for key, (value, before) in changes.items():
        error = refused(capsys, "train", config, "--resume", finished, f"--{key}", value)
        assert f"expected {key} = {before} as in" in error


def test_changed_text_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, text, folder = config_file(tmp_path), tmp_path / "text.txt", tmp_path / "run"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    data = ("--data.source", text)
    assert train_here(config, *data, "--run.dir", folder, "--train.steps", "2") == 0
    text.write_text("the quick brown fox jumps over the lazy cat\n" * 200)
    assert "found other tokens" in refused(capsys, "train", config, *data, "--resume", folder)


def test_checkpoint_of_another_model_names_the_parameter(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(finished, folder)
    assert (
        train_here(config_file(tmp_path), "--run.dir", other, "--train.steps", "2", "--model.ffn_dim", "96")
        == 0
    )
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(other / "checkpoints", folder / "checkpoints")
    error = refused(capsys, "train", tmp_path / "tiny.toml", "--resume", folder)
    assert "expected layers.0.feed_forward.w1.weight of shape [64, 32], found [96, 32]" in error


def test_damaged_runs_are_refused(tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = finished.parent / "tiny.toml"
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "checkpoints" / "step-2" / "__0_0.distcp").unlink()
    assert "found only damaged ones (step-2: no __0_0.distcp file" in refused(
        capsys, "train", config, "--resume", folder
    )
    (folder / "checkpoints" / "step-2" / ".metadata").write_bytes(b"no pickle")
    assert ".metadata holds 9 bytes" in refused(capsys, "train", config, "--resume", folder)
    shutil.rmtree(folder / "checkpoints")
    assert "expected a whole checkpoint, found none" in refused(capsys, "train", config, "--resume", folder)
    (folder / "run.json").write_text("{")
    assert "run.json: cannot read" in refused(capsys, "train", config, "--resume", folder)


def test_damaged_run_json_is_refused_by_every_command(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = finished.parent / "tiny.toml", tmp_path / "run"
    shutil.copytree(finished, folder)
    whole = json.loads((folder / "run.json").read_text())
    commands: tuple[tuple[str | Path, ...], ...] = (
        ("train", config, "--resume", folder), ("compare", finished, folder), ("generate", folder, "--prompt", "x"),
    )  # fmt: skip
    for damaged, key in (
        ({}, "vocab_size"),
        ({**whole, "corpus": {}}, "corpus.sha256"),
        ({**whole, "sessions": []}, "sessions"),
        ({**whole, "sessions": [{"engine": "none"}]}, "sessions"),
        ({**whole, "results": 3}, "results"),
    ):
        (folder / "run.json").write_text(json.dumps(damaged))
        for command in commands:
            assert f"run.json: expected a valid {key}" in refused(capsys, *command)


def test_mistake_that_every_rank_meets_is_printed_once(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    arguments = ("--nproc", "2", "--parallel.engine", "fsdp2", "--data.source", tmp_path / "missing.txt")
    status, out, err = run("train", config, *arguments, "--run.dir", tmp_path / "run")
    assert status == 2 and "step" not in out  # on a busy machine the start says what it is doing
    assert err.startswith("error: data.source: expected a file") and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_full_disk_is_one_line_and_earlier_checkpoints_stay(tmp_path: Path, finished: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    arguments = ("train", config_file(tmp_path), "--parallel.engine", "ddp", "--resume", folder)
    # Metrics stay below, weights do not.
    (status, err), (other, silent) = ranks(2, *arguments, largest_file=64_000)
    assert (status, other, silent) == (2, 2, "")
    assert err.startswith("error: ") and "cannot write" in err and err.count("\n") == 1
    assert steps_in(folder / "checkpoints") == [2]
    assert what_is_missing(folder / "checkpoints" / "step-2") is None
    assert run_record(folder)["status"] == "failed"


def test_metrics_that_cannot_be_written_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A new run, which does not look for earlier records: reading /dev/full never ends.
    config, folder = config_file(tmp_path), tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").symlink_to("/dev/full")
    assert "No space left on device" in refused(capsys, "train", config, "--run.dir", folder)


def test_killed_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    job = start(
        "train", config, "--nproc", "2", "--parallel.engine", "shardwright", "--run.dir", folder,
        "--train.steps", "100000", "--checkpoint.every", "2",
    )  # fmt: skip
    wait_for_steps(folder, 4)
    os.kill(rank_process(job, 1), signal.SIGKILL)
    killed = time.monotonic()
    status, _, err = finish(job, timeout=30)
    assert time.monotonic() - killed < 30
    assert status == 75 and err.startswith("error: rank 1 of 2 was killed by SIGKILL")
    assert f"train --resume {folder} --nproc 2" in err
    assert run_record(folder)["status"] == "failed"
    content = read_exit(folder)
    assert content is not None and (content["status"], content["rank"]) == (75, 1)
    assert content["saved"] == steps_in(folder / "checkpoints")[0]


def complaint(rank: int, order: int, kind: str) -> Complaint:
    return Complaint(rank, order, kind, f"{kind} of {rank}\nmore", "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statuses", "killed", "complaints", "expected"),
    [
        # Killed from outside, whatever the survivors say first.
        ({0: -9, 1: 1}, set(), [complaint(1, 1, "lost contact")], (0, "killed by SIGKILL")),
        # Its own error counts, not what others say of the lost contact, even when they were first.
        ({0: 1, 1: 1}, set(), [complaint(0, 1, "lost contact"), complaint(1, 2, "error")], (1, "error of 1")),
        ({0: 1, 1: 1}, set(), [complaint(1, 1, "error"), complaint(0, 2, "error")], (1, "error of 1")),
        # Without a word: an import that failed, say.
        ({0: -9, 1: 3}, {0}, [], (1, "exited with status 3")),
        # All the others lost contact to it, and the launcher had to end it.
        ({0: 1, 1: -9, 2: 1}, {1}, [complaint(r, r, "lost contact") for r in (0, 2)], (1, "did not answer")),
        ({0: 1, 1: 1}, set(), [complaint(1, 1, "lost contact"), complaint(0, 2, "lost contact")], (1, "lost contact")),
    ],
)  # fmt: skip
def test_the_rank_that_failed_first_is_found(
    statuses: dict[int, int], killed: set[int], complaints: list[Complaint], expected: tuple[int, str]
) -> None:
    ended = EndOfRanks(statuses, frozenset(killed))
    found = culprit(Evidence(RunFolder(Path()), Path(), ended, complaints, None))
    assert found.rank == expected[0] and expected[1] in found.how


@pytest.mark.extensive("it waits for a timeout")
def test_silent_rank_is_named(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    job = start(
        "train", config, "--nproc", "2", "--parallel.engine", "ddp", "--run.dir", folder,
        "--train.steps", "100000", environment={"SHARDWRIGHT_TIMEOUT": "6"},
    )  # fmt: skip
    wait_for_steps(folder, 2)
    os.kill(rank_process(job, 1), signal.SIGSTOP)
    status, _, err = finish(job, timeout=60)
    assert status == 75 and err.startswith("error: rank 1 of 2 did not answer the other ranks and was killed")


@pytest.mark.extensive("a job of processes of its own")
def test_ranks_leave_when_their_launcher_is_killed(tmp_path: Path) -> None:
    import psutil

    config, folder = config_file(tmp_path), tmp_path / "run"
    job = start(
        "train",
        config,
        "--nproc",
        "2",
        "--parallel.engine",
        "ddp",
        "--run.dir",
        folder,
        "--train.steps",
        "100000",
    )
    wait_for_steps(folder, 2)
    ranks = [rank_process(job, rank) for rank in (0, 1)]
    job.kill()
    job.communicate()
    wait_for(lambda: not any(psutil.pid_exists(rank) for rank in ranks), seconds=20)
    # The first rank has written what happened. Where it could not, the next resume does.
    content, record = read_exit(folder), run_record(folder)
    assert content is not None
    assert (content["status"], content["reason"]) == (75, "the launcher was killed")
    assert record["status"] == "failed" and record["sessions"][0]["ended_by"] == "the launcher was killed"
    record["status"] = record["sessions"][0]["status"] = "running"
    (folder / "run.json").write_text(json.dumps(record))
    repair_record(RunFolder(folder))
    record = run_record(folder)
    assert record["status"] == record["sessions"][0]["status"] == "failed"
    assert record["sessions"][0]["to_step"] == recorded_step(folder / "metrics.jsonl") >= 2
    # The line of one more step may be written after exit.json, while the rank leaves.
    assert recorded_step(folder / "metrics.jsonl") - content["step"] in (0, 1)


def test_runs_unchanged_under_torchrun(tmp_path: Path) -> None:
    """Without our launcher rank 0 decides the folder, and alone prints what the user has to correct."""
    config, folder = config_file(tmp_path), tmp_path / "run"
    engine = ("--parallel.engine", "ddp", "--run.dir", folder)
    assert ranks(2, "train", config, *engine, "--train.steps", "2") == [(0, ""), (0, "")]
    assert len(losses(folder)) == 2
    assert json.loads((folder / "run.json").read_text())["sessions"][0]["ranks"] == 2
    (first, said), (second, silent) = ranks(2, "train", config, *engine)
    assert (first, second) == (2, 2)
    assert said.startswith("error: run.dir: expected a folder without a run") and said.count("\n") == 1
    assert silent == ""
