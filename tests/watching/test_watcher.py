"""A rank acts on a verdict: who prints all of it, what a function of the user may do, and the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from shardwright.engine import heartbeat
from shardwright.watching import (
    Diagnosis,
    Eyes,
    Hang,
    HeartbeatReader,
    Watcher,
    WatchSettings,
    watcher as watching,
)
from shardwright.watching.diagnosis import BEHIND
from shardwright.watching.evidence import EvidenceFiles
from shardwright.watching.watcher import Finding

FINDING = Finding("the job hangs in step 4: rank 0 is behind\n  rank 0: forward", "hang-1", [0])


class Left(BaseException):
    """In place of the end of the process."""


@contextmanager
def a_watcher(
    folder: Path, say: Callable[[str], None] | None = None
) -> Iterator[tuple[Watcher, HeartbeatReader]]:
    beat = heartbeat.open_heartbeat(0, 2, folder)
    reader = HeartbeatReader(beat)
    watcher = Watcher(beat, {0: reader}, WatchSettings(600.0, folder / "hangs", judges=False, say=say))
    try:
        yield watcher, reader
    finally:
        watcher.close()
        heartbeat.close_heartbeat()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process would have ended."""
    statuses: list[int] = []

    def leave(status: int) -> NoReturn:
        statuses.append(status)
        raise Left

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(watching, "TO_SAY", 0.2)
    return statuses


def message(by: int | None) -> dict[str, object]:
    return {"text": FINDING.text, "at": time.monotonic_ns(), "by": by}


@pytest.mark.parametrize(
    ("by", "lines"),
    [
        (1, ["rank 0: the job hangs in step 4: rank 0 is behind (rank 1 has printed where each rank is)"]),
        (None, ["rank 0: the job hangs in step 4: rank 0 is behind", "  rank 0: forward"]),  # nobody could
        (0, []),  # this one has
    ],
)
def test_one_rank_prints_all_of_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ends: list[int], by: int | None, lines: list[str]
) -> None:
    with a_watcher(tmp_path) as (watcher, _), pytest.raises(Left):
        watcher._end(message(by))
    assert capfd.readouterr().err.splitlines() == lines
    assert ends == [75]


def test_the_rank_that_leads_prints_before_the_others_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_watcher(tmp_path) as (watcher, reader):
        watcher._leave(FINDING, None, [])
        assert json.loads(reader.message)["by"] == 0
        printed = capfd.readouterr().err.splitlines()
        assert printed[1:3] == ["  rank 0: forward", "Its stacks show where it is."]
        assert printed[3] == f"stacks and latest actions of the ranks: {tmp_path}/hangs/hang-1"
        monkeypatch.setattr(watching, "print", broken_pipe, raising=False)
        watcher._leave(FINDING, None, [])
        assert json.loads(reader.message)["by"] is None


def broken_pipe(*_: object, **__: object) -> None:
    raise BrokenPipeError


def fail(text: str) -> None:
    raise SystemExit(f"cannot send {len(text)} characters")


def test_a_function_that_raises_ends_the_process_with_the_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # of Left
    with a_watcher(tmp_path, fail) as (watcher, _):
        watcher._end(message(None))
        deadline = time.monotonic() + 20
        while not ends and time.monotonic() < deadline:
            time.sleep(0.02)
    output = capfd.readouterr().err
    assert output.startswith(f"rank 0: {FINDING.text}\nrank 0: on_stall raised SystemExit('cannot send")
    assert ends == [75] and "in fail" in output


def test_a_function_that_returns_lets_the_process_go_on(tmp_path: Path, ends: list[int]) -> None:
    texts: list[str] = []
    with a_watcher(tmp_path, texts.append) as (watcher, _):
        watcher._end(message(None))
        deadline = time.monotonic() + 20
        while not texts and time.monotonic() < deadline:
            time.sleep(0.02)
    assert texts == [f"rank 0: {FINDING.text}"] and not ends


def test_files_that_cannot_be_written_are_not_promised(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hangs").write_text("a file since the watch began")
    with a_watcher(tmp_path) as (watcher, _):
        watcher._leave(FINDING, None, [])
    assert capfd.readouterr().err.splitlines()[2:] == [
        f"stacks and latest actions of the ranks could not be written to {tmp_path}/hangs/hang-1: Not a directory"
    ]


@pytest.mark.parametrize(
    ("culprits", "stacks", "hint"),
    [
        ((1,), (0, 1), "Its stacks show where it is."),
        ((1, 2), (0, 1, 2), "Their stacks show where they are."),
        ((1,), (0,), ""),  # it is stopped, or on another host
        ((1, 2), (0, 1), ""),
        ((), (0, 1), ""),
    ],
)
def test_stacks_are_promised_only_where_they_are(
    culprits: tuple[int, ...], stacks: tuple[int, ...], hint: str
) -> None:
    text = Hang(
        Diagnosis(BEHIND, culprits, "why", "", lost=False, step=4), EvidenceFiles(Path("x"), stacks)
    ).text
    assert text.splitlines()[2:] == [*([hint] if hint else []), "stacks and latest actions of the ranks: x"]


@pytest.mark.parametrize("age", [0, 3600])
def test_the_steps_of_a_rank_that_died_before_any_look(tmp_path: Path, age: int) -> None:
    """Its heartbeat stays. One that is older than the job is of an earlier process with the same number."""
    program = "import os; from shardwright.engine import heartbeat as b; b.open_heartbeat(0, 1); "
    program += "b.begin_step(3); b.at(b.MODEL); os._exit(3)"
    process = subprocess.Popen([sys.executable, "-c", program])
    eyes = Eyes({0: process.pid}, 600.0, tmp_path, "stall_seconds")
    assert process.wait() == 3
    path = heartbeat.heartbeat_of(process.pid)
    os.utime(path, (time.time() - age,) * 2)
    try:
        assert eyes.steps_done() == ({} if age else {0: 2})
    finally:
        eyes.close()
        path.unlink(missing_ok=True)
