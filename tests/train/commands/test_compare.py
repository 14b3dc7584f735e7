"""`shardwright compare`: its figures from hand-made metrics, its refusals, and real runs side by side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright import cli
from shardwright.train.report import plots
from tests.train.kit.jobs import config_file, ranks, records, train_here


def altered(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a run with every record changed."""
    shutil.copytree(source, target)
    lines = records(target)
    for line in lines:
        change(line)
    (target / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return target


def test_figures_and_pictures(plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(record: dict[str, Any]) -> None:
        record["seconds"] *= 2
        record["tokens_per_second"] /= 2
        if record["step"] == 5:
            record["loss"] *= 1 + 1e-3

    slower = altered(plain_run, tmp_path / "slower", change)
    capsys.readouterr()
    assert (
        cli.main(["compare", str(plain_run), str(slower), str(plain_run), "--out", str(tmp_path / "out")])
        == 0
    )
    shown = capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    first, second, third = written["runs"]
    assert first["largest_relative_difference"] is None and third["largest_relative_difference"] == 0
    assert second["largest_relative_difference"] == pytest.approx(1e-3) and second["at_step"] == 5
    assert second["step_time_ratio"] == pytest.approx(2)
    assert second["tokens_per_second"] == pytest.approx(first["tokens_per_second"] / 2)
    assert [run["steps"] for run in written["runs"]] == [8, 8, 8]
    assert [run["common_steps"] for run in written["runs"]] == [None, 8, 8]
    assert [pair["at_step"] for pair in written["pairs"]][::2] == [5, 5]
    assert "1.0e-03" in shown and "2.00x" in shown and str(tmp_path / "out") in shown
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_speed_is_that_of_timed_steps_of_equal_sessions() -> None:
    """A run on two ranks that is killed after step 12, resumed from step 8 on two ranks, then on one, then on two."""
    records = [{"step": step} for step in range(1, 31)]
    sessions = [
        {"from_step": from_step, "engine": "shardwright", "ranks": ranks}
        for from_step, ranks in ((0, 2), (8, 2), (15, 1), (20, 2))
    ]

    def timed(sessions: list[dict[str, Any]]) -> list[int]:
        return [record["step"] for record in plots.timed_steps(records, sessions)]

    assert timed(sessions) == [*range(4, 9), *range(12, 16), *range(24, 31)]
    assert timed(sessions[:3]) == list(range(19, 31))
    # From an older checkpoint than the sessions before had.
    older = [*sessions[:2], {**sessions[0], "from_step": 5}]
    assert timed(older) == [4, 5, *range(9, 31)]
    assert timed([{**sessions[0], "from_step": 28}]) == [29, 30]  # too short for a warm-up


def test_a_gap_between_sessions_and_the_warm_up_of_a_resume_change_no_speed(
    plain_run: Path, tmp_path: Path
) -> None:
    """Eight steps in two sessions: only steps 4, and 8 of the second one, are timed."""

    def change(record: dict[str, Any]) -> None:
        timed = record["step"] in (4, 8)
        record["seconds"], record["tokens_per_second"] = (1.0, 256.0) if timed else (50.0, 5.12)

    resumed = altered(plain_run, tmp_path / "resumed", change)
    record = json.loads((resumed / "run.json").read_text())
    record["sessions"].append({**record["sessions"][0], "from_step": 4})
    (resumed / "run.json").write_text(json.dumps(record))
    assert cli.main(["compare", str(resumed), str(plain_run), "--out", str(tmp_path)]) == 0
    first = json.loads((tmp_path / "compare.json").read_text())["runs"][0]
    assert (first["tokens_per_second"], first["step_seconds"]) == (256.0, 1.0)


@pytest.mark.extensive("a run of each strategy")
def test_strategies_differ_in_what_the_engine_holds_and_leases(
    sharded_run: Path, plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks with zero3 and zero2, and one rank without the engine."""
    other = tmp_path / "zero2"
    arguments = ("--parallel.engine", "shardwright", "--parallel.strategy", "zero2", "--run.dir", other)
    assert ranks(2, "train", config_file(tmp_path), *arguments) == [(0, ""), (0, "")]
    capsys.readouterr()
    assert cli.main(["compare", str(sharded_run), str(other), "--out", str(tmp_path)]) == 0
    zero3, zero2 = json.loads((tmp_path / "compare.json").read_text())["runs"]
    parameters = 4 * json.loads((other / "run.json").read_text())["parameters"]
    # Half of the parameters and of the two moments.
    assert zero2["held_memory_bytes"] == zero3["held_memory_bytes"] >= 1.5 * parameters
    assert zero2["leased_memory_bytes"] > parameters > zero3["held_memory_bytes"] / 3
    assert zero3["leased_memory_bytes"] < zero2["leased_memory_bytes"]
    shown = capsys.readouterr().out
    for run in (zero2, zero3):
        engine = [f"{run[f'{key}_memory_bytes'] / 2**20:,.2f}" for key in ("held", "leased")]
        assert any(line.split()[1:3] == engine for line in shown.splitlines())
    assert "engine memory" in (other / "summary.txt").read_text()
    assert cli.main(["compare", str(other), str(plain_run), "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "compare.json").read_text())["runs"][1]["held_memory_bytes"] is None
    assert "not known: another engine" in capsys.readouterr().out


def test_without_a_folder_results_lie_with_the_first_run(plain_run: Path, tmp_path: Path) -> None:
    copies = [shutil.copytree(plain_run, tmp_path / name) for name in ("a", "b")]
    assert cli.main(["compare", *map(str, copies)]) == 0
    assert (copies[0] / "compare.json").exists() and (copies[0] / "compare.png").exists()
    assert not (copies[1] / "compare.json").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.seed", "1"),
        ("train.global_batch", "4"),
        ("model.dim", "64"),
        ("data.validation_fraction", "0.1"),
    ],
)
def test_other_jobs_are_refused_by_the_key(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    other = tmp_path / "other"
    assert train_here(config_file(tmp_path), "--run.dir", other, f"--{key}", value, "--train.steps", "1") == 0
    assert refusal(capsys, plain_run, other).startswith(
        f"error: compare: expected runs of the same job, found {key} ="
    )


def test_other_texts_and_no_runs_are_refused(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = altered(plain_run, tmp_path / "other", lambda record: None)
    record = json.loads((other / "run.json").read_text())
    record["corpus"]["sha256"] = "0" * 64
    (other / "run.json").write_text(json.dumps(record))
    assert "expected runs on the same data" in refusal(capsys, plain_run, other)
    (other / "metrics.jsonl").write_text("")
    assert "expected at least one step" in refusal(capsys, plain_run, other)
    assert "found no run.json" in refusal(capsys, plain_run, tmp_path)


def test_damaged_records_are_refused_by_the_line(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = altered(plain_run, tmp_path / "other", lambda record: None)
    metrics = other / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    for line, expected in (
        ("{", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("3", "expected a JSON object, found int"),
        ("{}", "expected a number for step, found None"),
        (lines[1].replace('"loss": ', '"loss": "high", "was": '), "expected a number for loss, found 'high'"),
        (lines[1].replace('"seconds": ', '"seconds": 0, "was": '), "expected seconds > 0, found 0"),
    ):
        metrics.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
        error = refusal(capsys, plain_run, other)
        assert expected in error and f"in line 2 of {metrics}" in error, line
    metrics.write_bytes(b"\xff\n")
    assert f"{metrics}: cannot read the metrics" in refusal(capsys, plain_run, other)
    metrics.unlink()
    assert f"{metrics}: cannot read the metrics" in refusal(capsys, plain_run, other)


def test_folder_that_cannot_be_written_is_refused_before_the_table(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out, expected in (
        (tmp_path / "file", "--out: expected a folder"),
        (Path("/proc/out"), "cannot write"),
    ):
        capsys.readouterr()
        assert cli.main(["compare", str(plain_run), str(plain_run), "--out", str(out)]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and expected in shown.err and shown.err.count("\n") == 1


def refusal(capsys: pytest.CaptureFixture[str], *runs: Path) -> str:
    capsys.readouterr()
    assert cli.main(["compare", *map(str, runs)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_engines_agree(plain_run: Path, sharded_run: Path, tmp_path: Path) -> None:
    """The parity proof in small: two ranks against one, and our engine against torch's."""
    fsdp2 = tmp_path / "fsdp2"
    arguments = ("--parallel.engine", "fsdp2", "--run.dir", fsdp2)
    assert ranks(2, "train", config_file(tmp_path), *arguments) == [(0, ""), (0, "")]
    assert cli.main(["compare", *map(str, (plain_run, sharded_run, fsdp2)), "--out", str(tmp_path)]) == 0
    ours, theirs, between = json.loads((tmp_path / "compare.json").read_text())["pairs"]
    assert ours["common_steps"] == 8
    assert ours["largest_relative_difference"] < 1e-5 and theirs["largest_relative_difference"] < 1e-5
    assert between["largest_relative_difference"] < 1e-6
