"""The peers' benchmark: what it computes from numbers, whom it believes, and that its command runs to the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import agreement, memory, tables
from benchmarks.peers.agreement import TOLERANCE, Numbers, difference, reference
from benchmarks.peers.shapes import SHAPES

ROOT = Path(__file__).resolve().parent.parent


def test_a_step_takes_as_long_as_the_slower_rank() -> None:
    assert tables.rank_maximum([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


def test_ratios_are_of_one_round_each() -> None:
    """The machine became twice as slow in the second round, for both."""
    found = tables.ratios([[1.0, 1.0], [2.0, 2.0], [3.0]], [[2.0, 2.0], [4.0, 4.0], [4.0]])
    assert found == {"median": 0.5, "least": 0.5, "largest": 0.75}


def test_contenders_without_figures_have_rows_and_reasons() -> None:
    ratio = {"median": 1.0, "least": 0.9, "largest": 1.1}
    contenders = {
        "FSDP2": {"off": 1e-7, "ms": 12.34, "ratio": ratio},
        "Other": {"reason": "is not installed"},
    }
    *_, base, other = tables.time_table(contenders).splitlines()
    assert base.split("|")[1:-1] == [
        " FSDP2          ",
        " 12.3 ",
        "     1.00 ",
        "    0.90 .. 1.10 ",
        " 1e-07 ",
    ]
    assert other.count(" - ") == 4
    assert tables.reasons(contenders) == ["Other: is not installed"]
    assert tables.memory_table(contenders).splitlines()[-1].count(" - ") == 6


def test_least_bytes_are_arithmetic() -> None:
    """100 float32 elements: parameters 400 bytes, moments 800, gradients 400; here 1000 of activations, or none."""
    assert memory.least(0, 100, 1000, 2) == (1200, 2200)
    assert memory.least(1, 100, 0, 2) == (800, 1200)
    assert memory.least(2, 100, 0, 2) == (800, 1000)
    assert memory.least(3, 100, 0, 2) == (600, 800)


def test_a_number_that_is_not_finite_is_infinitely_far() -> None:
    assert difference(Numbers([[1.0]], [float("nan")]), Numbers([[1.0]], [2.0])) == float("inf")


@pytest.mark.parametrize(("name", "value"), [("CLIP", 1e9), ("adamw_options", lambda kind: {"lr": 1.01e-3})])
def test_wrong_engines_are_beyond_the_tolerance(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    """An engine that does not clip, and one whose rate is 1% too large."""
    expected = reference(SHAPES["tiny"], 2)
    monkeypatch.setattr(agreement, name, value)
    off = difference(reference(SHAPES["tiny"], 2), expected)
    assert off > 3 * TOLERANCE, off


@pytest.mark.extensive("a benchmark")
def test_the_command_runs_two_contenders_to_the_end(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.peers",
        "--tiny",
        "--only",
        "zero3,Megatron",
        "--parts",
        "time,memory",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    contenders = json.loads((tmp_path / "peers.json").read_text())["shapes"]["tiny"]["contenders"]
    for name in ("FSDP2", "Shardwright zero3"):
        found = contenders[name]
        assert found["off"] < TOLERANCE and found["ratio"]["median"] > 0, found
        assert found["memory"]["peak"] > found["memory"]["rest"] >= found["memory"]["least_rest"]
    plain = contenders["plain torch"]
    assert plain["off"] > TOLERANCE  # it communicates nothing
    assert (
        plain["memory"]["rest"] < 1.01 * plain["memory"]["least_rest"]
    )  # its tables are all that it has beside
    assert "ratio" not in contenders["Megatron-FSDP"] and contenders["Megatron-FSDP"]["reason"]
    assert "| Shardwright zero3" in (tmp_path / "peers.txt").read_text()
