"""The end of a job: exit.json, run.json and the exit status agree, whoever has started the ranks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright import cli
from shardwright.train.errors import UserError
from shardwright.train.launch.job_end import JobEnd
from shardwright.train.rank import shared_folder
from shardwright.train.rank.hosted import train_in_group
from shardwright.train.run.exits import Outcome, is_saved, write_exit
from shardwright.train.run.finding import CONTINUE
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.lock import claim
from shardwright.train.run.metrics import last_record
from shardwright.train.run.writing import writing
from shardwright.train.step.numerics.detect import FaultError
from shardwright.train.step.numerics.verifying import CorruptionError
from shardwright.train.step.saving.checkpoint import SaveFailedError, _failures
from shardwright.train.step.trainer import Trainer
from tests.support import multirank
from tests.train.kit.jobs import TINY, config_file, ranks, read_exit, run_record, tiny, train_here


def ended(folder: Path) -> dict[str, Any]:
    content = read_exit(folder)
    assert content is not None
    return content


def sessions(folder: Path) -> list[tuple[str, str | None]]:
    return [(each["status"], each.get("ended_by")) for each in run_record(folder)["sessions"]]


def failing_at(patch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Let this process raise the error in the given step."""
    train_step = Trainer.train_step

    def fail(self: Trainer, *arguments: Any) -> Any:
        if self.position.step == step - 1:
            raise error
        return train_step(self, *arguments)

    patch.setattr(Trainer, "train_step", fail)


@pytest.mark.parametrize(
    ("error", "status", "session", "reason"),
    [
        (RuntimeError("of the\nmachine"), 1, "failed", "RuntimeError: of the machine"),
        (UserError("wrong"), 2, "failed", "wrong"),
        (UserError("no answer", passes=True), 75, "failed", "no answer"),
        (FaultError("NaN"), 1, "failed", "NaN"),
        (CorruptionError("a changed bit"), 75, "failed", "a changed bit"),
        (KeyboardInterrupt(), 130, "interrupted", "interrupted"),
    ],
)
def test_an_error_in_a_job_of_one_rank(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: int,
    session: str,
    reason: str,
) -> None:
    failing_at(monkeypatch, 3, error)
    assert train_here(config_file(tmp_path), "--run.dir", tmp_path / "run") == status
    content = ended(tmp_path / "run")
    assert (content["status"], content["reason"], content["step"]) == (status, reason, 2)
    assert content["rank"] == (0 if isinstance(error, RuntimeError) else None)
    assert sessions(tmp_path / "run") == [(session, reason)]
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {reason}") and shown.count("\n") == 1


@pytest.mark.parametrize("begun", [False, True], ids=["a new run", "a run that goes on"])
@pytest.mark.parametrize("place", ["_check_seen", "_of_other_ranks", "RankGroup"])
@pytest.mark.parametrize(
    "error", [UserError("not shared"), OSError("of the network"), KeyboardInterrupt()], ids=repr
)
def test_a_folder_is_free_again_if_the_ranks_cannot_open_it(
    tmp_path: Path,
    plain_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: bool,
    place: str,
    error: BaseException,
) -> None:
    """The process may live on, as under Ray, and try again."""
    folder = tmp_path / "run"
    if begun:
        shutil.copytree(plain_run, folder)
    config = tiny(run={"dir": str(folder)})
    world: Any = SimpleNamespace(is_first=True)

    class Lost:
        def all_gather(self, value: object) -> list[object]:
            return [value]

        def broadcast(self, value: object) -> None:
            raise error

    def fail(*arguments: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(shared_folder, place, Lost if place == "RankGroup" else fail)
        with pytest.raises(type(error)):
            shared_folder.open_together(config, CONTINUE, world)
    assert folder.exists() is begun
    with shared_folder.open_together(config, CONTINUE, world).lock:
        pass


@pytest.mark.extensive("a job of several ranks")
@multirank(2)
def test_jobs_in_a_process_group_of_a_framework(rank: int, world_size: int, tmp_path: Path) -> None:
    """As under Ray Train: an error of one rank, the rest of the job after it, and a mistake, all in one group."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    values, folder = tomllib.loads(TINY), tmp_path / "run"
    values["parallel"]["engine"] = "shardwright"
    saved: list[int] = []

    def train() -> int:
        return train_in_group(values, folder, lambda run, step: saved.append(step)).status

    error = ValueError("of rank 1") if rank == 1 else RuntimeError("Connection closed by peer")
    with pytest.MonkeyPatch.context() as patch:
        failing_at(patch, 5, error)
        with pytest.raises(type(error), match=str(error)):
            train()
    if rank == 1:  # rank 0 leaves it to this one
        content = ended(folder)
        assert (content["status"], content["rank"], content["reason"]) == (1, 1, "ValueError: of rank 1")
        assert sessions(folder) == [("failed", "ValueError: of rank 1")]
    assert train() == 0 and saved == [3, 6, 8]
    if rank == 0:
        assert (ended(folder)["status"], ended(folder)["attempt"]) == (0, 2)
        assert sessions(folder) == [("failed", "ValueError: of rank 1"), ("finished", None)]
    values["train"]["seq_len"] = 16
    with pytest.raises(UserError, match=r"expected train\.seq_len = 32") as refused:
        train()
    if rank == 0:
        assert (ended(folder)["status"], ended(folder)["reason"]) == (2, str(refused.value))


@pytest.mark.extensive("each number of ranks", but=("alone", "two"))
@pytest.mark.parametrize("count", [0, 1, 2], ids=["alone", "one", "two"])
def test_a_refused_resume_is_the_end_of_the_job(
    tmp_path: Path, plain_run: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """In this process, and on ranks of another launcher, whose status torchrun hides. A script must not take the end of
    the session before for this one's."""
    folder = tmp_path / "run"
    shutil.copytree(plain_run, folder)
    damaged = json.loads((folder / "run.json").read_text()) | {"sessions": []}

    def refused(*arguments: str) -> int:
        """The status in exit.json, which was 75."""
        JobEnd(RunFolder(folder), 1).write_exit_file(Outcome(75, "killed"))
        arguments = ("train", "--resume", str(folder), *arguments)
        if count:
            engine = ("--parallel.engine", "ddp") if count > 1 else ()
            (status, err), *_ = ranks(count, *arguments, *engine)
        else:
            status, err = cli.main(list(arguments)), capsys.readouterr().err
        content = ended(folder)
        assert status == 2 and (content["reason"] in err) == (content["status"] == 2)
        return int(content["status"])

    if count != 2:
        mistakes = (("--model.dim", "33"), ("--data.source", "nothing"), ("--train.steps", "8"))
        assert [refused(*each) for each in mistakes] == [2, 2, 2]
    with claim(folder):  # another job runs there
        assert refused("--model.n_layers", "3") == 75
    assert refused("--model.n_layers", "3") == 2
    (folder / "run.json").write_text(json.dumps(damaged))
    assert refused("--train.steps", "9") == 2


@pytest.mark.parametrize("failed", [(), (3,), (6, 7), (8,)], ids=str)
def test_the_step_of_the_end_is_the_last_one_done(
    failed: tuple[int, ...], plain_run: Path, tmp_path: Path
) -> None:
    """Saves in the background whose failures are known after later steps are no steps that come later."""
    shutil.copytree(plain_run, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    with folder.metrics_file.open("a") as stream:
        stream.writelines(json.dumps({"step": step, "save_failure": "no room"}) + "\n" for step in failed)
    write_exit(folder, Outcome(0, "done"), 1)
    content = ended(tmp_path / "run")
    assert (content["step"], content["saved"]) == (8, 8) and is_saved(folder)
    assert last_record(folder.metrics_file)["loss"] > 0


ERRORS = {
    errno.ENOSPC: "free some space", errno.EDQUOT: "free some space", errno.EACCES: "write", errno.EROFS: "write",
    errno.EIO: "", errno.EISDIR: "",
}  # fmt: skip


@pytest.mark.parametrize("by_text", [False, True], ids=["own", "of another rank"])
@pytest.mark.parametrize("number", ERRORS)
def test_advice_names_another_folder_only_where_it_can_be_chosen(
    number: int, by_text: bool, tmp_path: Path
) -> None:
    error = OSError(number, os.strerror(number))
    if by_text:
        error = OSError(f"rank 1: {os.strerror(number)}")
    for key in ("", "run.dir", "--out"):
        with pytest.raises(UserError) as raised, writing(tmp_path, key):
            raise error
        text = str(raised.value)
        assert os.strerror(number) in text and ERRORS[number] in text.lower()
        assert ("folder in which" in text or "another folder" in text) == bool(key)
        assert ("a resumed run writes to the same folder" in text) != bool(key)
    with pytest.raises(SaveFailedError, match="a resumed run writes to the same folder"), _failures(tmp_path):
        raise error
