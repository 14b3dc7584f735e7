"""The GPU benchmark on the CPU: its arithmetic and verdicts, and that no row, failure or deadline ends the others.

How failures are reported is in test_gpu_failures.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_rows import verdicts
from benchmarks.gpu_rows.crew import run_row
from benchmarks.gpu_rows.rows import FSDP2, PLAIN, ROWS, SHARDWRIGHT, Row, Variant, need
from benchmarks.gpu_rows.tables import text_of
from benchmarks.gpu_rows.worker import Rank
from shardwright.train.config.shapes.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
ENGINES = (Variant(PLAIN), Variant(FSDP2), Variant(SHARDWRIGHT))
COMMUNICATING = Variant(SHARDWRIGHT, communicating=True)
ROW = Row("small", "3B", 4096, (*ENGINES, Variant(SHARDWRIGHT, "arena")), compile=True)
FALLING = [6.0, 5.8, 5.6, 5.4, 5.2, 5.0]


def line(variant: str, ms: float, losses: list[float] | None = None, **figures: float) -> dict[str, Any]:
    return {
        "variant": variant, "ms": [ms] * 3, "host_ms": 1.0, "start_seconds": 1.0, "flops_per_step": 5e12,
        "losses": losses or FALLING, "norms": [1.0] * 6, **figures,
    }  # fmt: skip


def summary(*lines: dict[str, Any], row: Row = ROW, error: str = "") -> dict[str, Any]:
    return verdicts.summary(row, {"lines": list(lines), "error": error, "seconds": 1.0}, 1e14)


def test_a_parameter_needs_16_bytes_and_the_engines_share_them() -> None:
    parameters = PRESETS["3B"].parameters
    one, four = (need(replace(ROW, checkpoint="full"), Variant(FSDP2), ranks) for ranks in (1, 4))
    assert 16 * parameters < one.weights + one.gradients < 18.5 * parameters
    assert four.weights + four.gradients < one.weights + one.gradients - 0.7 * 16 * parameters
    assert one.activations == four.activations < need(ROW, Variant(FSDP2), 1).activations
    largest = max(need(row, variant, 1).total for row in ROWS for variant in row.variants)
    assert 60e9 < largest < 80e9  # an H100 takes every row


def test_collectives_of_one_rank_are_for_one_device() -> None:
    assert "every variant communicates" in gpu.reason_to_skip(ROW, COMMUNICATING, "cuda", ranks=2)
    assert not gpu.reason_to_skip(replace(ROW, compile=False), COMMUNICATING, "cuda", ranks=1)


def test_turns_go_back_as_they_came() -> None:
    assert [v.engine for v in Row("", "1B", 1, ENGINES).order()] == [
        PLAIN,
        FSDP2,
        SHARDWRIGHT,
        SHARDWRIGHT,
        FSDP2,
        PLAIN,
    ]


def test_targets_are_met_or_not_or_not_measured() -> None:
    found = summary(
        line(PLAIN, 100.0), line(FSDP2, 110.0), line(SHARDWRIGHT, 104.0),
        line("shardwright arena", 101.0, active_bytes=100, reserved_bytes=103),
        line("shardwright arena", 101.0, active_bytes=100, reserved_bytes=102), line(PLAIN, 99.0),
    )  # fmt: skip
    rows = [ROW, replace(ROW, name="later")]
    targets = verdicts.targets(rows, {"small": found}, 1, cuda=True)
    verdict = {(t["row"], t["variant"], t["what"]): (t["verdict"], t["value"]) for t in targets}
    assert verdict["small", SHARDWRIGHT, "time / plain torch"] == ("not met", 1.04)
    assert verdict["small", SHARDWRIGHT, "time / FSDP2"] == ("met", pytest.approx(104 / 110))
    assert verdict["small", SHARDWRIGHT, "MFU"] == ("not met", pytest.approx(5e12 / 0.104 / 1e14))
    assert verdict["small", "shardwright arena", "reserved / active"] == ("not met", 1.03)
    # The second turns of arena and plain torch are compared with each other.
    assert verdict["small", "shardwright arena", "time / plain torch"][1] == pytest.approx(
        (1.01 + 101 / 99) / 2
    )
    assert {v for (row, *_), v in verdict.items() if row == "later"} == {("not measured", None)}
    for ranks, cuda in ((2, True), (1, False)):
        targets = verdicts.targets([ROW], {"small": found}, ranks, cuda)
        assert {t["verdict"] for t in targets if t["what"].startswith("time")} == {"not measured"}


def test_the_largest_gap_is_relative_to_its_target() -> None:
    found = summary(line(PLAIN, 100.0), line(FSDP2, 99.0), line(SHARDWRIGHT, 101.0))
    gap = verdicts.largest_gap([ROW], {"small": found})
    assert gap is not None and gap[1:] == (Variant(SHARDWRIGHT), Variant(FSDP2), pytest.approx(101 / 99))
    assert verdicts.largest_gap([ROW], {}) is None


@pytest.mark.parametrize(
    "losses", [[6.0] * 6, [6.0, 5.8, 5.6, 5.4, 5.2, float("nan")], [6.0, 5.8, 5.6, 5.4, 5.2, 5.1]]
)
def test_wrong_losses_are_named(losses: list[float]) -> None:
    """An engine that does not train, one that diverges, one that falls behind; rounding is tolerated."""
    result = summary(
        line(PLAIN, 1.0), line(FSDP2, 1.0, losses), line(SHARDWRIGHT, 1.0, [x + 1e-4 for x in FALLING])
    )
    assert [text.split(" are ")[0] for text in result["disagree"]] == ["losses of FSDP2"]
    assert verdicts.problems({"small": result})[0].startswith("small: losses of FSDP2")


def test_exact_rows_compare_bits() -> None:
    row = replace(
        ROW, exact=True, variants=(Variant(FSDP2), *ENGINES[2:], Variant(SHARDWRIGHT, waiting=True))
    )
    other = [*FALLING[:-1], 5.0000001]
    result = summary(
        line(FSDP2, 1.0, other), line(SHARDWRIGHT, 1.0), line("shardwright waiting", 1.0, other), row=row
    )
    assert result["disagree"] == ["losses of shardwright waiting have other bits than those of shardwright"]


def test_rows_are_measured_although_others_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("broken", "1B", 4096, (Variant("another engine"), Variant(SHARDWRIGHT)), turns=1),
        Row(
            "whole",
            "1B",
            4096,
            (
                *ENGINES,
                Variant(SHARDWRIGHT, "arena"),
                Variant(SHARDWRIGHT, graph=True),
                COMMUNICATING,
            ),
        ),
    ]
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path)], rows) == 1
    results = json.loads(
        (tmp_path / f"{gpu.file_stem({'machine': gpu.machine('cpu'), 'ranks': 1})}.json").read_text()
    )
    assert results["problems"] == ["broken: another engine failed"]
    broken = results["rows"]["broken"]["variants"]
    assert "KeyError: 'another engine'" in broken["another engine"]["error"] and "ms" in broken[SHARDWRIGHT]
    whole = results["rows"]["whole"]["variants"]
    for name in (PLAIN, FSDP2, SHARDWRIGHT, "shardwright arena", "shardwright communicating"):
        assert len(whole[name]["turns_ms"]) == 2 and whole[name]["loss_off"] < 1e-2, whole[name]
    assert whole[SHARDWRIGHT]["of_plain"]["median"] > 0 < whole[SHARDWRIGHT]["of_fsdp2"]["median"]
    assert "needs a CUDA device" in whole["shardwright graph"]["skipped"]
    assert {target["verdict"] for target in results["targets"]} == {"not measured"}
    profile = results["profile"]
    assert profile["row"] == "whole"
    assert profile["variants"][profile["variant"]]["profile"]["host_ms"]["aten::mm"] > 0
    text = capsys.readouterr().out
    assert text == text_of(results)
    assert "another engine failed: KeyError" in text and "shardwright graph: skipped: a CUDA graph" in text


def test_after_the_deadline_rows_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock moves only while a row runs, so that the machine's load does not decide."""
    now = [0.0]

    def run_late(row: Row, program: Path, order: Any, environment: Any, seconds: float) -> dict[str, Any]:
        now[0] += seconds
        return {"lines": [], "error": "not done after 9 s", "late": True, "seconds": seconds}

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(gpu, "run_row", run_late)
    rows = [Row(name, "1B", 4096, ENGINES) for name in ("first", "second")]
    assert gpu.main(["--device", "cpu", "--seconds", "10", "--out", str(tmp_path)], rows) == 0
    text = next(tmp_path.glob("*.txt")).read_text()
    assert "verdict: nothing was measured" in text
    assert "FSDP2: left out: no time" in text  # the first row was ended within its own limit
    assert "left out: no time: second" in text


def test_a_row_that_is_too_slow_is_ended(tmp_path: Path) -> None:
    row = replace(Row("slow", "1B", 4096, ENGINES).tiny(), seconds=1)
    order = {"device": "cpu", "ranks": 1, "profile": False, "backend": "eager"}
    measured = run_row(row, Path(gpu.__file__), order, {}, 1)
    assert (
        measured["late"] and measured["error"].startswith("hung: not done after") and measured["seconds"] < 30
    )
    problems = verdicts.problems({"slow": verdicts.summary(row, measured, None)})
    assert len(problems) == 1 and problems[0].startswith("slow: hung: not done after")


def test_a_device_that_is_too_small_skips_with_the_arithmetic(tmp_path: Path) -> None:
    order = {"row": ROW.as_json(), "ranks": 1, "device": "cpu", "limit_bytes": 67e9}
    process = Rank(order, 0, tmp_path)
    assert process.reason_against(Variant(FSDP2)) == ""
    reason = process.reason_against(Variant(PLAIN))
    assert reason.startswith("needs 67.5 GB (weights and moments 45.0, ") and reason.endswith(
        "67.0 GB are free"
    )


class Event:
    """Stands for an event of a device that needs 5 ms between any two."""

    def __init__(self, enable_timing: bool) -> None:
        self.recorded = not enable_timing

    def record(self) -> None:
        self.recorded = True

    def elapsed_time(self, other: Event) -> float:
        assert self.recorded and other.recorded
        return 5.0


def test_a_turn_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of ``torch.cuda`` that a turn calls are replaced; tensors are on the CPU."""
    stats = {"active_bytes.all.peak": 100, "reserved_bytes.all.peak": 130}
    for name, function in {
        "Event": Event,
        "memory_stats": lambda device: stats,
        "memory_allocated": lambda device: 7,
        "mem_get_info": lambda device: (int(2e9), int(4e9)),
        "reset_peak_memory_stats": lambda device: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    row = replace(ROW, compile=False).tiny()
    order = {"row": row.as_json(), "ranks": 1, "device": "cpu", "backend": "eager", "profile": False}
    process = Rank(order, 0, tmp_path)
    process.cuda = True
    assert process.free_bytes() == 2e9 and process.reason_against(Variant(PLAIN)) == ""
    found = process.turn(Variant(PLAIN))
    assert found["ms"] == [5.0] * row.steps
    assert (found["active_bytes"], found["reserved_bytes"], found["left_bytes"]) == (100, 130, 7)
    assert found["losses"][-1] < found["losses"][0]


def test_all_rows_of_an_h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With figures as its processes would report them. One row ends without any."""
    properties = SimpleNamespace(total_memory=85e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(gpu, "reason_to_skip", lambda *_: "")
    slow = {FSDP2: 110.0, SHARDWRIGHT: 103.0}

    def run_row(row: Row, program: Path, order: dict[str, Any], *_: Any) -> dict[str, Any]:
        memory = {"active_bytes": 50e9, "reserved_bytes": 50.5e9, "left_bytes": 0}
        lines = [line(v.name, slow.get(v.name, 100.0), **memory, flops_per_step=6e13) for v in row.order()]
        if order["profile"]:
            lines = [each | {"profile": {"device_ms": {"gemm": 90.0}, "host_ms": {}}} for each in lines]
        if row.name == "1B":
            return {"lines": [], "error": "rank 0 ended with status 1\nKilled", "late": False, "seconds": 9.0}
        return {"lines": lines, "error": "", "late": False, "seconds": 9.0}

    monkeypatch.setattr(gpu, "run_row", run_row)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    version = ".".join(torch.__version__.split(".")[:2])
    results = json.loads((tmp_path / f"gpu-h100-80gb-hbm3-torch-{version}.json").read_text())
    assert results["problems"] == ["1B: rank 0 ended with status 1"]
    verdict = {(t["row"], t["variant"], t["what"]): t["verdict"] for t in results["targets"]}
    assert verdict["3B compiled", SHARDWRIGHT, "MFU"] == "met"  # 6e14 of 989e12 FLOP/s
    assert verdict["3B compiled", SHARDWRIGHT, "time / plain torch"] == "not met"
    assert verdict["150M", "shardwright arena", "reserved / active"] == "met"
    assert verdict["1B", SHARDWRIGHT, "time / FSDP2"] == "not measured"
    assert (
        "1B compiled",
        COMMUNICATING.name,
        "time / FSDP2",
    ) not in verdict  # on one device nobody communicates
    assert COMMUNICATING.name in results["rows"]["1B compiled"]["variants"]
    assert results["profile"]["variant"] == SHARDWRIGHT
    text = (tmp_path / f"gpu-h100-80gb-hbm3-torch-{version}.txt").read_text()
    assert "gemm" in text and "58.9%" in text and "Killed" in text


@pytest.mark.parametrize(
    ("only", "names", "unknown"),
    [
        ("", [row.name for row in ROWS], []),
        ("150M", ["150M"], []),  # this row, though two names contain it
        ("150m exact, 1B ,3B compiled", ["150M exact", "1B", "3B compiled"], []),  # in this order
        ("memory,exact", ["1B memory and graphs", "150M exact"], []),
        ("3B", ["3B compiled", "3B 8k full compiled", "3B full"], []),  # no row has this name
        ("1B,1b", ["1B"], []),
        ("70B,1B", ["1B"], ["70B"]),
    ],
)
def test_rows_are_chosen_by_name(only: str, names: list[str], unknown: list[str]) -> None:
    rows, without = gpu.chosen(ROWS, only)
    assert ([row.name for row in rows], without) == (names, unknown)


def test_runs_of_some_rows_have_files_of_their_own() -> None:
    results = {"machine": {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130"}, "ranks": 2}
    assert gpu.file_stem(results) == "gpu-2x-h100-80gb-hbm3-torch-2.11"
    assert (
        gpu.file_stem(results | {"only": "1B,150M exact"}) == "gpu-2x-h100-80gb-hbm3-torch-2.11-1b-150m-exact"
    )


def test_a_row_takes_less_than_100_s() -> None:
    assert max(row.seconds for row in ROWS) < 100


def test_an_unknown_row_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--only", "1B,70B", "--device", "cpu"]) == 2
    assert "no row has '70B' in its name" in capsys.readouterr().err


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2


def test_it_needs_only_torch() -> None:
    code = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pydantic", "rich", "psutil", "matplotlib", "tensorboard", "annotated_types"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import benchmarks.gpu, benchmarks.gpu_rows.worker
assert not {"numpy.testing", "shardwright.train.config.load"} & {*sys.modules}
"""
    path = [str(ROOT / "src"), str(ROOT)]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path}\n{code}"], timeout=180)
    assert done.returncode == 0
