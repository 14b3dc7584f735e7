"""Checkpoints of a run in another folder or behind a URL: `checkpoint.folder`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import cli
from shardwright.train.config import CheckpointConfig
from shardwright.train.launch.restarts import Attempt, place_in_words
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.exits import TRY_AGAIN, Outcome
from shardwright.train.run.folder import RunFolder, checkpoints_of
from shardwright.train.run.position import Position, step_folder
from shardwright.train.run.stored_checkpoint import examine
from shardwright.train.step import loading
from shardwright.train.step.saving.checkpoint import SaveFailedError
from shardwright.train.step.saving.saves import Saves
from tests.train.kit.damage import flipped
from tests.train.kit.faults import environment
from tests.train.kit.hooks import EXAMPLES
from tests.train.kit.jobs import config_file, losses, ranks, read_exit, steps_in, tiny, train_here
from tests.train.launch.kit.forked import launch

pytest.importorskip("fsspec", reason="needs fsspec")
from tests.checkpoint.kit.fake_store import FakeStore, known_to_children


@pytest.fixture(autouse=True)
def _whole_store() -> None:
    FakeStore.restart()


def place(folder: Path, kind: str) -> str:
    return {
        "url": f"fake://{folder}/store",
        "folder": str(folder / "store"),
        "file": f"file://{folder}/store",
        "user's": f"my_store:Shelf://{folder}/store",  # of docs/extending.md
    }[kind]


@pytest.fixture
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_store.py").write_text(EXAMPLES["my_store.py"])
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.modules.pop("my_store", None)
    sys.path[:] = path


@pytest.mark.extensive("each place", but=("user's-False",))
@pytest.mark.usefixtures("_own_store")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", ["url", "folder", "file", "user's"])
def test_a_run_saves_goes_on_and_is_read_there(
    tmp_path: Path,
    plain_run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    background: bool,
) -> None:
    known_to_children(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config, run = config_file(tmp_path), tmp_path / "run"
    there = checkpoints_of(RunFolder(run), tiny(checkpoint={"folder": place(tmp_path, kind)}).checkpoint)
    where = (
        "--checkpoint.folder",
        place(tmp_path, kind),
        "--checkpoint.asynchronous",
        str(background).lower(),
    )
    assert train_here(config, "--run.dir", run, *where, "--train.steps", "5") == 0
    assert steps_in(there) == [5, 3]
    assert not (run / "checkpoints").exists()
    assert train_here(config, "--resume", run, *where) == 0
    assert losses(run) == losses(plain_run)
    assert steps_in(there) == [8, 6]
    capsys.readouterr()
    for arguments in ([str(run)], [f"{place(tmp_path, kind)}/run"]):
        assert cli.main(["inspect", *arguments]) == 0
        assert ": 2 checkpoints" in capsys.readouterr().out
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert cli.main(["generate", str(run), "--prompt", "a", "--tokens", "2"]) == 0
    capsys.readouterr()
    # Nothing that would lose it.
    assert cli.main(["train", str(config), "--resume", str(run)]) != 0
    assert "expected checkpoint.folder = " in capsys.readouterr().err
    again = ["train", str(config), "--run.dir", str(tmp_path / "other" / "run"), *where[:2]]
    assert cli.main(again) != 0
    err = capsys.readouterr().err
    assert "expected no checkpoint of another run in " in err and err.count("\n") == 1
    assert not (tmp_path / "other").exists() or not any((tmp_path / "other").rglob("*"))


@pytest.mark.extensive("another writer for each rank")
def test_several_ranks_write_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known_to_children(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config, run = config_file(tmp_path), tmp_path / "run"
    arguments = (
        "train",
        config,
        "--parallel.engine",
        "shardwright",
        "--checkpoint.folder",
        place(tmp_path, "url"),
    )
    well = [(0, ""), (0, "")]
    begun = ("--run.dir", run, "--checkpoint.asynchronous", "true")
    assert ranks(2, *arguments, *begun) == well
    assert steps_in(f"{place(tmp_path, 'url')}/run") == [8, 6]


def test_a_place_that_cannot_be_used_is_an_error_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file(tmp_path)
    (tmp_path / "file").touch()
    for folder, problem in {
        "absent://bucket/runs": "no file system for absent://",
        "fake://": "names no place for a checkpoint",
        "memory://a/../b": "names no place for a checkpoint",
        str(tmp_path / "file" / "runs"): f"{tmp_path / 'file'} is no folder",
    }.items():
        run = tmp_path / "run"
        assert cli.main(["train", str(config), "--run.dir", str(run), "--checkpoint.folder", folder]) != 0
        err = capsys.readouterr().err
        assert "checkpoint.folder" in err and problem in err and err.count("\n") == 1
        assert not run.exists()
    FakeStore.restart(1)
    url = place(tmp_path, "url")
    assert cli.main(["train", str(config), "--run.dir", str(run), "--checkpoint.folder", url]) != 0
    assert f"{url}/run/__begun" in capsys.readouterr().err and not run.exists()


class Small:
    """A plain model with checkpoints behind a URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.reporter = Reporter([])

    def save(self, step: int, last: bool = False, **settings: Any) -> None:
        saves = Saves(CheckpointConfig(**settings), self.url, self.reporter)
        self.model(torch.ones(3)).sum().backward()
        self.optimizer.step()
        saves.save(self.model, self.optimizer, Position(step, step), last)


def test_old_ones_go_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    job = Small(f"fake://{tmp_path}")
    for step in range(1, 6):
        job.save(step, keep=2, keep_every=4)
    assert steps_in(job.url) == [5, 4]
    (parts,) = (tmp_path / "step-5").glob("__0_0.*")
    flipped(parts, tmp_path)
    job.save(6, keep=2)
    assert steps_in(job.url) == [6, 5, 4]
    job.save(7, keep=2)
    assert steps_in(job.url) == [7, 6]
    # A fall-back from a damaged one, which the run then reaches again, and what a killed save has left.
    for name in ("index.json", "__0_0"):
        (file,) = (tmp_path / "step-7").glob(f"{name}*")
        flipped(file, tmp_path) if name != "index.json" else file.unlink()
        job.save(7, keep=2)
        assert steps_in(job.url) == [7, 6]
        loading.load_weights(step_folder(job.url, 7), nn.Linear(3, 2))


@pytest.mark.parametrize("background", [False, True])
def test_a_step_is_saved_again(tmp_path: Path, background: bool) -> None:
    """As before a fault in the step after a checkpoint; and with another position, as after samples were left out."""
    known_to_children(tmp_path)
    job = Small(f"fake://{tmp_path}")
    settings = CheckpointConfig(asynchronous=background)
    with Saves(settings, job.url, job.reporter) as saves:
        saves.save(job.model, job.optimizer, Position(2, 8))
        saves.save(job.model, job.optimizer, Position(2, 8), last=True)
        names = {path.name for path in (tmp_path / "step-2").iterdir()}
        saves.save(job.model, job.optimizer, Position(2, 8), last=True)
        assert {path.name for path in (tmp_path / "step-2").iterdir()} == names
        saves.save(job.model, job.optimizer, Position(2, 12), last=True)
    assert examine(step_folder(job.url, 2)).position.samples == 12
    with Saves(settings, job.url, job.reporter, loaded=2) as saves:
        saves.save(job.model, job.optimizer, Position(2, 12), last=True)


@pytest.mark.parametrize("number", range(1, 9))
def test_a_store_that_fails_loses_nothing_and_the_run_goes_on(tmp_path: Path, number: int) -> None:
    job = Small(f"fake://{tmp_path}")
    job.save(1)
    FakeStore.restart(number, "down")
    job.save(2, on_save_failure="continue")
    (failure,) = job.reporter.failed_saves
    assert failure.startswith("step 2") or "step-2" in failure
    with pytest.raises(SaveFailedError, match="the store has failed"):
        job.save(2, last=True)
    FakeStore.restart()
    loading.load_weights(step_folder(job.url, 1), nn.Linear(3, 2))
    job.save(2)
    loading.load_weights(step_folder(job.url, 2), nn.Linear(3, 2))


@pytest.mark.extensive("a job that is restarted")
def test_restarts_behind_a_url(tmp_path: Path, plain_run: Path) -> None:
    config, run = config_file(tmp_path), tmp_path / "run"
    where = (
        "--checkpoint.folder",
        place(tmp_path, "url"),
        "--optimizer.name",
        "tests.train.kit.faults:ADAMW",
    )
    faults = environment(tmp_path / "faults", "0 2 SIGKILL", "0 5 SIGKILL")
    arguments = ("train", config, "--run.dir", run, *where, "--nproc", "1", "--max-restarts", "2")
    status, out, err = launch(
        tmp_path, *arguments, environment=faults, imports="tests.checkpoint.kit.fake_store"
    )
    assert (status, err) == (0, "")
    assert "starting from the beginning on 1 rank, since nothing is saved" in out
    assert "; resuming from step 3 on 1 rank" in out
    assert losses(run) == losses(plain_run)
    content = read_exit(run)
    assert content is not None and (content["saved"], content["attempt"]) == (8, 3)


def test_a_restart_does_not_begin_again_if_the_store_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would save over the checkpoints that it does not see."""

    def silent(folder: RunFolder) -> int | None:
        raise OSError("no answer")

    folder = RunFolder(tmp_path)
    folder.config_file.write_text("")
    attempt, end = Attempt(1, 2, ("train", "job.toml")), Outcome(TRY_AGAIN, "killed")
    assert attempt.after(end, 2, folder, began=True).arguments == ("train", str(folder.config_file))
    monkeypatch.setattr("shardwright.train.launch.restarts.newest_saved", silent)
    assert attempt.after(end, 2, folder, began=True).arguments == ("train", "--resume", str(tmp_path))
    assert place_in_words(folder, 2) == "resuming on 2 ranks"
