"""The checker of fault campaigns finds each thing that must not happen, and a small campaign passes."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.faults.checker import check

Line = dict[str, Any]


def attempt(
    run: str, number: int, begin: int, end: int, fault: str = "", saves: tuple[int, ...] = ()
) -> list[Line]:
    """An attempt on 2 ranks that does the steps after ``begin``, up to ``end``."""
    place = {"run": run, "attempt": number}
    lines: list[Line] = [{"event": "attempt", **place, "ranks": 2}]
    ranks = [{**place, "rank": rank} for rank in range(2)]
    if begin:
        lines += [
            {"event": "resumed", **each, "step": begin, "digest": f"{begin} {each['rank']}"} for each in ranks
        ]
    for step in range(begin + 1, end + 1):
        for each in ranks:
            line = {"digest": f"{step} {each['rank']}", "loss": 1 / step, "rows": [step * 10 + each["rank"]]}
            lines.append({"event": "step", **each, "step": step, **line})
        if step in saves:
            lines.append({"event": "saved", **ranks[0], "step": step})
    statuses = [0, 0]
    if fault:
        lines.append(
            {"event": "fault", **ranks[1], "fault_kind": fault, "fault_victim": "rank", "fault_rank": 1,
             "fault_step": end, "fault_phase": "after"}
        )  # fmt: skip
        statuses = [75, -9]
    lines.append(
        {"event": "ended", **place, "statuses": statuses, "killed": [], "seconds": 1.0, "orphans": 0}
    )
    return lines


def history() -> list[Line]:
    """A reference of 6 steps, and a run that was killed after step 3 and stopped after step 5."""
    runs: list[Line] = []
    for name in ("reference", "run"):
        runs.append(
            {"event": "run", "run": name, "attempt": 1, "config": "c", "ranks": 2, "steps": 6,
             "is_reference": name == "reference"}
        )  # fmt: skip
        if name == "reference":
            runs += attempt(name, 1, 0, 6, saves=(2, 4, 6))
        else:
            runs += attempt(name, 1, 0, 3, "kill", saves=(2,))
            runs += attempt(name, 2, 2, 5, "stop", saves=(4,))
            runs += attempt(name, 3, 4, 6, saves=(6,))
        runs.append({"event": "final", "run": name, "attempt": 1, "digest": "f"})
    return runs


def of(lines: list[Line], event: str, number: int, **facts: Any) -> Line:
    """The line of the run's attempt with this event and these facts."""
    return next(
        line
        for line in lines
        if (line["event"], line["run"], line["attempt"]) == (event, "run", number)
        and all(line.get(key) == value for key, value in facts.items())
    )


def test_a_right_history_has_no_problem() -> None:
    verdicts, problems = check(history())
    assert problems == [] and [each.problems for each in verdicts] == [(), ()]
    assert [each.repeated for each in verdicts] == [1, 1]


def lost(lines: list[Line]) -> None:
    begin = next(i for i, line in enumerate(lines) if line["run"] == "run" and line["attempt"] == 2)
    end = next(i for i, line in enumerate(lines) if line["run"] == "run" and line["attempt"] == 3)
    lines[begin:end] = attempt("run", 2, 0, 5, "stop", saves=(4,))


def skipped(lines: list[Line]) -> None:
    lines.remove(of(lines, "step", 3, step=5, rank=1))


def remove_last_step(lines: list[Line]) -> None:
    for rank in range(2):
        lines.remove(of(lines, "step", 3, step=6, rank=rank))


CASES: dict[str, tuple[Callable[[list[Line]], Any], str]] = {
    "a saved checkpoint is lost": (lost, "step 2 was saved, and the attempt goes on from step 0"),
    "other weights after a resume": (
        lambda lines: of(lines, "resumed", 2, rank=1).update(digest="x"),
        "rank 1 has other weights at step 2, from its resumed",
    ),
    "other weights after a step": (
        lambda lines: of(lines, "step", 3, step=6, rank=0).update(digest="x"),
        "rank 0 has other weights at step 6, from its step",
    ),
    "ranks at different steps": (
        lambda lines: of(lines, "resumed", 2, rank=1).update(step=1, digest="1 1"),
        "ranks resume from different steps",
    ),
    "a step is left out": (skipped, r"rank 1 does steps \[6\] after step 4"),
    "other samples": (
        lambda lines: of(lines, "step", 2, step=3, rank=0).update(rows=[7]),
        "step 3 has other samples",
    ),
    "another loss": (
        lambda lines: of(lines, "step", 2, step=3, rank=0).update(loss=2.0),
        "the loss of step 3 is 2.0",
    ),
    "a loss that is no number": (
        lambda lines: of(lines, "step", 2, step=3, rank=0).update(loss=float("nan")),
        "the loss of step 3 is nan",
    ),
    "a rank waits without end": (
        lambda lines: of(lines, "ended", 1).update(killed=[0]),
        r"ranks \[0\] had to be killed",
    ),
    "an odd status": (
        lambda lines: of(lines, "ended", 2).update(statuses=[2, -9]),
        r"ranks ended with status \[2\]",
    ),
    "a writer lives on": (
        lambda lines: of(lines, "ended", 2).update(orphans=1),
        "1 writer processes outlived",
    ),
    "an attempt does not end": (lambda lines: lines.remove(of(lines, "ended", 1)), "the attempt did not end"),
    "the last attempt fails": (
        lambda lines: of(lines, "ended", 3).update(statuses=[0, 1]),
        "the last attempt failed",
    ),
    "the last step is missing": (remove_last_step, "the last step is not 6"),
    "another last checkpoint": (
        lambda lines: of(lines, "final", 1).update(digest="x"),
        "the last checkpoint is not bit-equal",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_checker_finds(case: str) -> None:
    breaks, problem = CASES[case]
    lines = copy.deepcopy(history())
    breaks(lines)
    verdicts, problems = check(lines)
    found = [*problems, *(each for verdict in verdicts for each in verdict.problems)]
    assert any(re.search(problem, each) for each in found), found


def campaign(*options: str) -> subprocess.CompletedProcess[str]:
    return in_the_tree("-m", "tools.faults", *options)


def in_the_tree(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}:{root}"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.extensive("a tool: tens of jobs are killed")
def test_a_small_campaign_loses_nothing(tmp_path: Path) -> None:
    done = campaign("--kills", "3", "--commands", "0", "--seed", "3", "--keep", str(tmp_path / "runs"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 faults, 0 with a problem, 0 problems of runs; seed 3" in done.stdout


@pytest.mark.extensive("a tool")
def test_a_campaign_without_time_fails(tmp_path: Path) -> None:
    done = campaign("--kills", "2", "--commands", "1", "--minutes", "0", "--keep", str(tmp_path / "runs"))
    assert done.returncode == 1
    assert "the time was up after 0 of 3 faults" in done.stdout


@pytest.mark.extensive("a tool, in a process that imports the trainer")
def test_the_trainer_has_the_points_of_the_campaign(tmp_path: Path) -> None:
    """In a process of its own, whose trainer stays wrapped."""
    code = f"""
import pathlib
from tools.faults.history import History
from tools.faults.planting import Plan, plant

plant(Plan(None, History(pathlib.Path({str(tmp_path / "history")!r}), None, 0)), None)
"""
    done = in_the_tree("-c", code)
    assert done.returncode == 0, done.stderr
