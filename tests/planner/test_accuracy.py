"""Plans beside runs: the file that keeps them, and the table of `shardwright plan --accuracy`."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import main
from shardwright.planner import Residual, accuracy
from shardwright.train.launch import forecast
from shardwright.train.run.folder import RunFolder

GIB = 1 << 30


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return accuracy.file()


def residual(**values: Any) -> Residual:
    first = Residual("2026-11-27T08:00:00+00:00", "h100", 8, "yes", 50 * GIB, 40 * GIB, "2.13.0", "1.0")
    return first._replace(**values)


def test_what_is_kept_is_read(state: Path) -> None:
    kept = [residual(), residual(reserved=None), residual(device="b200", ranks=1)]
    for each in kept:
        accuracy.append(each)
    assert accuracy.read() == kept
    assert [Residual(**json.loads(line)) for line in state.read_text().splitlines()] == kept


def test_runs_that_end_together_keep_their_lines() -> None:
    def end(ranks: int) -> None:
        for _ in range(50):
            accuracy.append(residual(ranks=ranks))

    threads = [threading.Thread(target=end, args=(ranks,)) for ranks in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(each.ranks for each in accuracy.read()) == sorted(list(range(4)) * 50)


DAMAGE = (
    "",
    "{",
    "[]",
    "null",
    '{"ended": "x"}',
    json.dumps({**residual()._asdict(), "planned": "9"}),
    json.dumps({**residual()._asdict(), "reserved": True}),
    json.dumps({**residual()._asdict(), "more": 1}),
    "\x00\x80",
)


@pytest.mark.parametrize("line", DAMAGE)
def test_a_damaged_line_counts_as_none(state: Path, line: str) -> None:
    accuracy.append(residual())
    with state.open("a") as file:
        file.write(f"{line}\n")
    accuracy.append(residual(ranks=2))
    assert [each.ranks for each in accuracy.read()] == [8, 2]


def test_a_folder_that_cannot_be_written_loses_nothing_else(state: Path) -> None:
    state.parent.write_text("a file is in the way")
    accuracy.append(residual())
    assert accuracy.read() == []


def test_a_table_has_a_row_for_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--accuracy"]) == 0
    assert capsys.readouterr().out.startswith("no run with a plan has ended yet")
    for each in (
        residual(),
        residual(planned=41 * GIB),
        residual(planned=38 * GIB),
        residual(reserved=None),
        residual(reserved=None, fits="no"),
        residual(device="b200", reserved=None),
    ):
        accuracy.append(each)
    assert main(["plan", "--accuracy"]) == 0
    _, _, *rows, last = capsys.readouterr().out.splitlines()
    assert [" ".join(row.split()) for row in rows] == [
        "b200 1 - - - 1, 1 of them with a plan that fits",
        "h100 5 +2.5% -5.0% +25.0% 2, 1 of them with a plan that fits",
    ]
    assert last == "farthest: 2026-11-27T08:00:00+00:00, 8x h100, planned 50.00 GiB, reserved 40.00"


def test_the_end_of_a_run_is_kept_beside_its_plan(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    assert forecast.note_reserved(folder, 7) == [] and accuracy.read() == []  # there is no plan
    figures = {
        "device": "h100",
        "ranks": 4,
        "fits": "yes",
        "reserved_bytes": 3 * GIB,
        "room_bytes": 70 * GIB,
        "peak": {"text": "backward"},
    }
    forecast.plan_file(folder).write_text(json.dumps(figures))
    (line,) = forecast.note_reserved(folder, 2 * GIB)
    assert " ".join(line.split()) == "plan 3.00 GiB, +50.0% beside the peak memory"
    assert len(forecast.note_out_of_memory(folder)) == 1
    assert [each[1:6] for each in accuracy.read()] == [
        ("h100", 4, "yes", 3 * GIB, 2 * GIB),
        ("h100", 4, "yes", 3 * GIB, None),
    ]
