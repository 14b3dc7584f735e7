"""Signals: answered at once, a save within the time for it, a second signal; and what exit.json says of the end."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright import cli
from shardwright.cli.parsing import split_overrides
from shardwright.cli.program import _parsers
from shardwright.train.config import FaultConfig
from shardwright.train.errors import UserError
from shardwright.train.launch import job_end
from shardwright.train.launch.environment import FOLDER_VARIABLE
from shardwright.train.launch.job_end import Complaint, JobEnd
from shardwright.train.launch.judgement import EndOfRanks, Evidence, announce, judge
from shardwright.train.launch.signals import (
    SIGNALS,
    StopRequest,
    answered_signals,
    restore_handlers,
    status_of_signal,
)
from shardwright.train.rank import process
from shardwright.train.rank.process import complaint_of
from shardwright.train.run.exits import Outcome, is_saved, remove_exit
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.metrics import recorded_step
from shardwright.train.run.record import RunRecord, close_session
from shardwright.train.step import signal_answers
from shardwright.train.step.saving import saves
from shardwright.train.step.trainer import Trainer
from tests.train.kit.damage import what_is_missing
from tests.train.kit.faults import environment
from tests.train.kit.jobs import config_file, read_exit, records, run_record, train_here
from tests.train.launch.kit.forked import launch

SOURCE = Path(__file__).parents[3]


class Left(Exception):
    """In place of the end of the process."""


@contextmanager
def signals_at(step: int, *numbers: int, pause: float = 0.0) -> Iterator[None]:
    """This process gets these signals in the given step."""
    before = Trainer.train_step
    # nohup ignores SIGHUP, and the trainer leaves it so.
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in numbers}

    def train_step(self: Trainer, *arguments: Any) -> Any:
        if self.position.step == step - 1:
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(pause)
        return before(self, *arguments)

    Trainer.train_step = train_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.train_step = before  # type: ignore[method-assign]
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_saves_and_is_answered_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    before = signal.getsignal(number)
    with signals_at(2, number, pause=0.3):
        status = train_here(config_file(tmp_path), "--run.dir", folder, "--train.steps", "50")
    assert status == (130 if number == signal.SIGINT else 143)
    lines = capsys.readouterr().out.splitlines()
    answer = lines.index(f"{number.name} received; saving after step 2")
    assert answer < next(place for place, line in enumerate(lines) if line.startswith("step  2/50"))
    assert what_is_missing(folder / "checkpoints" / "step-2") is None
    assert [record["step"] for record in records(folder)] == [1, 2]
    content, record = read_exit(folder), run_record(folder)
    assert content is not None and content["status"] == status
    assert content["reason"] == f"stopped by {number.name}; the state is saved"
    assert (content["step"], content["saved"], content["attempt"]) == (2, 2, 1)
    assert record["status"] == "interrupted"
    assert signal.getsignal(number) is before


def answered(
    request: StopRequest,
    noted: Callable[[int], None] = lambda number: None,
    leave: Callable[[], None] = lambda: None,
) -> AbstractContextManager[None]:
    return answered_signals(request, noted, leave)


def ends_in_thread(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process would have ended."""
    statuses: list[int] = []

    def leave(status: int) -> None:
        statuses.append(status)
        raise Left

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    return statuses


def slow_last_save(monkeypatch: pytest.MonkeyPatch, statuses: list[int]) -> None:
    """A last checkpoint that is not written before the process would have ended."""

    def save(self: saves.Saves, *arguments: Any, last: bool = False) -> None:
        deadline = time.monotonic() + 10
        while not statuses and time.monotonic() < deadline:
            time.sleep(0.01)
        raise Left

    monkeypatch.setattr(saves.Saves, "save", save)


def test_a_save_that_takes_too_long_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    statuses = ends_in_thread(monkeypatch)
    slow_last_save(monkeypatch, statuses)
    with signals_at(2, signal.SIGTERM, pause=0.1):
        train_here(config_file(tmp_path), "--run.dir", folder, "--fault.save_seconds", "0.2")
    assert statuses == [75]
    reason = "stopped by SIGTERM without saving: the checkpoint took longer than fault.save_seconds = 0.2"
    assert capsys.readouterr().err.startswith(reason + "\n")
    assert [record["step"] for record in records(folder)] == [1, 2]


def test_a_second_signal_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before stays, and the command to continue from it is printed."""
    folder, config = tmp_path / "run", config_file(tmp_path)
    assert train_here(config, "--run.dir", folder, "--train.steps", "3") == 0
    capsys.readouterr()
    monkeypatch.setattr("shardwright.train.launch.signals.TWICE", 0.1)
    statuses = ends_in_thread(monkeypatch)
    slow_last_save(monkeypatch, statuses)
    with signals_at(5, signal.SIGUSR1, signal.SIGUSR1, pause=0.3):
        train_here(config, "--resume", folder, "--train.steps", "50")
    assert statuses == [143]
    said = capsys.readouterr().err
    assert said.startswith(
        "stopped by SIGUSR1 without saving: a second signal\nstep 3 is saved; to continue:\n"
    )
    assert f"train --resume {folder}" in said
    assert what_is_missing(folder / "checkpoints" / "step-3") is None


def test_a_rank_leaves_also_if_its_terminal_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = ends_in_thread(monkeypatch)
    world: Any = SimpleNamespace(is_first=True, size=1)
    answering = signal_answers.SignalAnswers(3, 0.0, JobEnd(RunFolder(tmp_path / "run"), 1), world)
    terminal = io.StringIO()
    terminal.close()
    monkeypatch.setattr("sys.stderr", terminal)
    answering._request.note(signal.SIGTERM)
    with pytest.raises(Left):
        answering._leave()
    assert statuses == [75]


def test_a_rank_leaves_without_its_launcher_also_if_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a store")

    statuses = ends_in_thread(monkeypatch)
    monkeypatch.setattr(job_end, "write_exit", fail)
    for name, value in (("RANK", "0"), (FOLDER_VARIABLE, str(tmp_path))):
        monkeypatch.setenv(name, value)
    with pytest.raises(Left):
        process.leave_with(launcher=-1)
    assert statuses == [75]


def test_ignored_signals_stay_ignored() -> None:
    """nohup ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with answered(stop := StopRequest()):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert stop.signal_number is None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        restore_handlers()
        signal.signal(signal.SIGHUP, before)


def test_one_keypress_that_arrives_twice_is_one_signal() -> None:
    """The terminal sends one signal, and the launcher another."""
    noted: list[int] = []
    left: list[str] = []
    stop = StopRequest()
    with answered(stop, noted.append, lambda: left.append(stop.hurry)):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        assert stop.signal_number == signal.SIGINT
    restore_handlers()
    assert noted == [signal.SIGINT] and left == []


def test_a_request_has_one_reason_to_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("shardwright.train.launch.signals.time", SimpleNamespace(monotonic=lambda: now))
    unlimited, limited = StopRequest(), StopRequest(save_seconds=5)
    for stop in (unlimited, limited):
        assert (stop.signal_number, stop.seconds_left, stop.hurry) == (None, None, "")
        stop.note(signal.SIGUSR1)
    now += 0.5
    limited.note(signal.SIGTERM)  # the same keypress
    assert (limited.signal_number, limited.seconds_left, limited.hurry) == (signal.SIGUSR1, 4.5, "")
    now += 1
    limited.note(signal.SIGTERM)
    assert (limited.hurry, limited.is_late) == ("a second signal", False)
    now += 99
    assert limited.is_late and limited.hurry.endswith("longer than fault.save_seconds = 5")
    assert (unlimited.seconds_left, unlimited.hurry) == (None, "")


def evidence(folder: Path, statuses: dict[int, int], **known: Any) -> Evidence:
    given: dict[str, Any] = {"complaints": [], "first_signal": None, **known}
    of_ranks = {key: given.pop(key) for key in ("killed", "hurried", "late") if key in given}
    return Evidence(RunFolder(folder), folder, EndOfRanks(statuses, **of_ranks), **given)


def saved_run(folder: Path, step: int, saved: int) -> None:
    (folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    (folder / "checkpoints" / f"step-{saved}").mkdir(parents=True)
    (folder / "run.json").write_text("{}")


ERROR = Complaint(0, 1, "error", "OSError: no\n  space", "")
FINISHED = {"status": "finished"}
BY_RANK = {"status": "interrupted"}  # a signal that only a rank got
LOST = Complaint(0, 1, "lost contact", "RuntimeError: rank 1 did not come", "")


@pytest.mark.parametrize(
    ("statuses", "known", "status", "words"),
    [
        ({0: 0, 1: 0}, {}, 0, "done"),
        ({0: 143, 1: 143}, {"first_signal": 15}, 143, "stopped by SIGTERM without saving: a second signal"),
        ({0: -9, 1: -9}, {"first_signal": 10, "killed": {0, 1}, "hurried": "late", "late": True}, 75, "saving: late"),
        ({0: -9, 1: -9}, {"first_signal": 2, "killed": {0, 1}, "hurried": "a second signal"}, 130, "a second signal"),
        ({0: -9, 1: 1}, {}, 75, "rank 0 of 2 was killed by SIGKILL"),
        ({0: -11, 1: 1}, {}, 1, "rank 0 of 2 was killed by SIGSEGV"),
        ({0: 1, 1: 2}, {"complaints": [Complaint(1, 1, "user", "wrong", "")]}, 2, "wrong"),
        ({0: 143, 1: 143}, {"session": {**BY_RANK, "ended_by": "by SIGUSR1 without saving"}}, 143, "SIGUSR1 without"),
        ({0: 0, 1: -15}, {"first_signal": 15, "session": FINISHED}, 0, "done"),
        ({0: -9, 1: -9}, {"killed": {0, 1}, "hurried": "x", "first_signal": 15, "session": FINISHED}, 0, "done"),
        ({0: 1, 1: 0}, {"complaints": [ERROR], "session": FINISHED}, 1, "failed with OSError: no space"),
        ({0: 1, 1: 0}, {"complaints": [LOST]}, 1, "rank 1 of 2 ended in the middle of the run with status 0"),
        ({0: -6, 1: 0}, {}, 1, "rank 1 of 2 ended in the middle of the run with status 0"),
        ({0: -9, 1: 0}, {}, 75, "rank 0 of 2 was killed by SIGKILL"),
    ],
)  # fmt: skip
def test_the_status_of_a_job(
    tmp_path: Path, statuses: dict[int, int], known: dict[str, Any], status: int, words: str
) -> None:
    saved_run(tmp_path, step=7, saved=5)
    end = judge(evidence(tmp_path, statuses, **known))
    assert end.status == status and words in end.reason


def test_ranks_that_saved_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first rank has said it, so the launcher says nothing."""
    saved_run(tmp_path, step=7, saved=7)
    left = evidence(tmp_path, {0: 143, 1: 143}, first_signal=signal.SIGTERM)
    end = judge(left)
    assert end == Outcome(143, "stopped by SIGTERM; the state is saved")
    assert announce(left, end, debug=False) == 143
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("sizes differ"), False),
        (UserError("run.plan: jobs run out of memory"), False),
    ],
)
def test_a_complaint_says_that_memory_ran_out(error: Exception, is_so: bool, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    complaint = complaint_of(raised.value, 1)
    assert complaint.out_of_memory == is_so
    known = evidence(tmp_path, {0: 1, 1: 1}, complaints=[complaint])
    assert known.is_out_of_memory(1) == is_so and not known.is_out_of_memory(0)


def test_a_long_error_is_one_line_of_limited_length() -> None:
    complaint = Complaint(0, 1, "error", "ValueError: one\n  two\n" + "x" * 9999, "")
    assert complaint.in_short.startswith("ValueError: one two xxx") and complaint.in_short.endswith("x ...")
    assert len(complaint.in_short) < 500


@pytest.mark.extensive("each launcher")
@pytest.mark.parametrize(
    "torchrun", [None, ("--standalone", "--nproc-per-node", "2")], ids=["launcher", "torchrun"]
)
def test_a_signal_after_all_is_done_changes_nothing(tmp_path: Path, torchrun: tuple[str, ...] | None) -> None:
    folder, nproc = tmp_path / "run", () if torchrun else ("--nproc", "2", "--max-restarts", "1")
    status, out, err = launch(
        tmp_path, "train", config_file(tmp_path), "--parallel.engine", "shardwright", "--run.dir", folder, *nproc,
        "--train.steps", "2", torchrun=torchrun, imports="tests.train.launch.kit.late_signals",
        environment={"PYTHONPATH": os.pathsep.join([str(SOURCE / "src"), str(SOURCE)])},
    )  # fmt: skip
    assert status == 0 and "warning" not in err, out + err
    content, record = read_exit(folder), run_record(folder)
    assert content is not None and (content["status"], content["reason"]) == (0, "done")
    assert record["status"] == "finished" and "ended_by" not in record["sessions"][-1]


def test_handlers_are_those_of_before_in_a_process_that_goes_on() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with answered(StopRequest()):
            pass
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        with answered(stop := StopRequest()):  # of another run in this process
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            assert stop.signal_number == signal.SIGTERM
    finally:
        restore_handlers()
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(Left), answered(StopRequest()):
        raise Left
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.extensive("a job of processes of its own")
def test_a_signal_to_one_rank_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status, out, err = launch(
        tmp_path, "train", config_file(tmp_path), "--parallel.engine", "shardwright", "--run.dir", folder,
        "--nproc", "2", "--optimizer.name", "tests.train.kit.faults:ADAMW",
        environment=environment(tmp_path / "faults", "1 4 SIGUSR1"),
    )  # fmt: skip
    assert status == 143, out + err
    assert re.search(r"\nSIGUSR1 received by another rank; saving[^\n]*step \d+", out), out
    content, record = read_exit(folder), run_record(folder)
    reason = "stopped by SIGUSR1; the state is saved"
    assert content is not None and (content["reason"], content["saved"]) == (reason, content["step"])
    assert (record["status"], record["sessions"][-1]["ended_by"]) == ("interrupted", reason)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (Outcome(143, "of a signal"), "interrupted"),
        (Outcome(75, "late"), "failed"),
        (Outcome(1, "bad"), "failed"),
    ],
)
def test_run_json_agrees_with_the_status(tmp_path: Path, plain_run: Path, end: Outcome, status: str) -> None:
    record = json.loads((plain_run / "run.json").read_text())
    for before in ("running", "failed"):
        record["status"] = record["sessions"][0]["status"] = before
        (tmp_path / "run.json").write_text(json.dumps(record))
        close_session(RunFolder(tmp_path), end, sessions_before=0)
        found = run_record(tmp_path)
        assert found["status"] == found["sessions"][0]["status"] == status
        assert found["sessions"][0]["ended_by"] == end.reason


def test_a_second_signal_after_the_save_of_the_last_step(tmp_path: Path, plain_run: Path) -> None:
    """The launcher ended the ranks; the newest checkpoint is of the last step."""
    saved_run(tmp_path, step=7, saved=7)
    left = evidence(tmp_path, {0: -9, 1: -9}, first_signal=15, killed={0, 1}, hurried="a second signal")
    assert judge(left) == Outcome(143, "stopped by SIGTERM; the state is saved")


def test_exit_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    JobEnd(folder, 1).write(Outcome(1, "early"))
    assert not folder.exit_file.exists()  # no run began
    saved_run(tmp_path, step=7, saved=5)
    JobEnd(folder, 3).write(Outcome(75, "rank 1 was killed", 1, lost=True))
    content = read_exit(tmp_path)
    assert content is not None and content.pop("time")
    assert content == {
        "status": 75, "reason": "rank 1 was killed", "step": 7, "saved": 5, "rank": 1, "attempt": 3,
    }  # fmt: skip
    assert not is_saved(folder)
    folder.exit_file.write_text('{"status"')
    assert read_exit(tmp_path) is None
    remove_exit(folder)
    remove_exit(folder)
    assert not folder.exit_file.exists()


def test_a_run_that_was_killed_after_its_last_step_ends_well(
    tmp_path: Path, plain_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(plain_run, folder)
    record = json.loads((folder / "run.json").read_text())
    record["status"] = record["sessions"][0]["status"] = "running"
    (folder / "run.json").write_text(json.dumps(record))
    before = (folder / "metrics.jsonl").read_bytes()
    assert train_here(config_file(tmp_path), "--resume", folder) == 0
    record = run_record(folder)
    assert [each["status"] for each in record["sessions"]] == ["failed", "finished"]
    assert record["sessions"][0]["ended_by"] == "its processes were killed, or the machine stopped"
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_step_outside_the_run_loses_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the index of a checkpoint, and in position.json of older ones. Such a checkpoint is damaged."""
    folder, config = tmp_path / "run", config_file(tmp_path)
    assert train_here(config, "--run.dir", folder, "--train.steps", "2") == 0
    before = (folder / "metrics.jsonl").read_bytes()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    index = checkpoint / "index.json"
    whole = index.read_text()
    for step in ("-5", "1", "999"):
        assert '"step":2,' in whole
        index.write_text(whole.replace('"step":2,', f'"step":{step},'))
        assert cli.main(["train", str(config), "--resume", str(folder)]) == 2
        assert "found only damaged ones" in capsys.readouterr().err
        assert (folder / "metrics.jsonl").read_bytes() == before
    index.unlink()
    for step in (-5, 1, 999):
        (checkpoint / "position.json").write_text(json.dumps({"step": step, "samples": 16}))
        assert cli.main(["train", str(config), "--resume", str(folder)]) == 2
        assert (folder / "metrics.jsonl").read_bytes() == before, step
    assert not (folder / "metrics.dropped.jsonl").exists()


def test_the_last_step_in_the_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert recorded_step(file) == 0
    for text, step in (
        ("", 0),
        ('{"step": 3}', 0),  # half a line
        ('{"step": 3}\n{"step": 4', 3),
        ('{"step": 3}\n{"step": 2, "save_failure": "full"}\n', 3),  # it failed in the background
        ('{"step": 3}\n{"step": 4, "incident": {}}\n', 3),
        ('{"step": 3}\n[]\n\0\0\n', 3),
        ('{"step": 1}\n' * 9000 + '{"step": 9}\n', 9),
    ):
        file.write_text(text)
        assert recorded_step(file) == step, text[:40]


def test_what_the_attempts_before_have_printed(tmp_path: Path) -> None:
    """Up to the first attempt of this job; earlier jobs printed elsewhere."""
    record = RunRecord.__new__(RunRecord)
    for earlier, reached in (
        ([], 0),
        ([(1, 9)], 9),
        ([(1, 30), (1, 9), (2, 5)], 9),
        ([(1, 30), (2, 40), (1, None), (2, 5)], 5),
    ):
        sessions = [{"attempt": attempt, "to_step": step} for attempt, step in earlier]
        present = {"attempt": sessions[-1]["attempt"] + 1 if sessions else 1}  # type: ignore[operator]
        record.content = {"sessions": [*sessions, present]}
        assert record.reached_before == reached


def test_statuses_of_signals() -> None:
    assert [status_of_signal(number) for number in SIGNALS] == [130, 143, 143, 143]


def test_the_page_on_faults(plain_run: Path) -> None:
    """Its commands are understood, and it has every key of exit.json. The pages on faults have all of `[fault]`."""
    docs = Path(__file__).parents[3] / "docs"
    page, *others = [
        (docs / name).read_text(encoding="utf-8") for name in ("faults.md", "numbers.md", "hangs.md")
    ]
    commands = [
        line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()
    ]
    parser, _ = _parsers()
    ours = [line.rpartition("shardwright train ")[2] for line in commands if "shardwright train" in line]
    assert len(ours) == 3
    for line in ours:
        arguments, keys = split_overrides(shlex.split(line))
        parser.parse_args(["train", *arguments])
        assert keys in ([], [("run.dir", "runs/job")])
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    content = read_exit(plain_run)
    assert content is not None
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert list(json.loads(shown)) == list(content)
    assert rows >= content.keys()
    assert {
        key for key in FaultConfig.model_fields if not any(key in each for each in (page, *others))
    } == set()
