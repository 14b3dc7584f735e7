"""A row of the GPU benchmark in which variants hang, abort or fail. Each is named with its reason, none ends others."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_rows import crew, verdicts
from benchmarks.gpu_rows.crew import run_row
from benchmarks.gpu_rows.failures import chain_of, described, ending
from benchmarks.gpu_rows.faults import EXPECTED, FAULTS
from benchmarks.gpu_rows.processes import end, output_of, start
from benchmarks.gpu_rows.rows import PLAIN, SHARDWRIGHT, Row, Variant

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = {
    "": Variant(PLAIN),
    "chain": Variant(SHARDWRIGHT),
    "abort": Variant(SHARDWRIGHT, "arena"),
    "capture": Variant(SHARDWRIGHT, "max_pool"),
    "none": Variant(SHARDWRIGHT, "double_buffer"),
    "hang": Variant(SHARDWRIGHT, waiting=True),
}


def test_each_fault_is_reported_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(crew, "ONE_TURN", 0.08)
    row = Row("faulty", "1B", 4096, tuple(VARIANTS.values()), turns=1, seconds=400)
    options = [f"--inject={VARIANTS[fault].name}={fault}" for fault in FAULTS]
    assert (
        gpu.main(["--device=cpu", "--seconds=400", "--no-profile", f"--out={tmp_path}", *options], [row]) == 1
    )
    assert len([*tmp_path.iterdir()]) == 2
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    variants = results["rows"]["faulty"]["variants"]
    assert "error" not in results["rows"]["faulty"]
    assert results["problems"] == [
        f"faulty: {VARIANTS[fault].name} failed" for fault in VARIANTS if fault in FAULTS
    ]
    for fault, parts in EXPECTED.items():
        found = variants[VARIANTS[fault].name]
        assert all(part in found["error"] for part in parts), found
    for fault in ("", "none"):
        assert "ms" in variants[VARIANTS[fault].name], variants
    text = capsys.readouterr().out
    for part in (
        "all numbers agree",
        "left out",
        "no time",
    ):
        assert part not in text
    for part in (
        f"{VARIANTS['hang'].name} failed: hung: not done after",
        "The above exception was the direct cause of the following exception:",
        "during capture",
        'faults.py", line',
        "Current thread",
    ):
        assert part in text, part


PROGRAM = """
import json, os, sys, time
from pathlib import Path

folder, rank = Path(sys.argv[2]), int(sys.argv[3])
order = json.loads((folder / "order.json").read_text())
while rank and not (folder / "rank0.jsonl").exists():
    time.sleep(0.01)
with (folder / f"rank{rank}.jsonl").open("a") as stream:
    def write(**line):
        print(json.dumps(line), file=stream, flush=True)
    if order["faults"].get("start"):
        raise ValueError("before any variant")
    for variant in order["row"]["variants"]:
        memory = [variant["memory"]] * (variant["memory"] != "dynamic")
        name = " ".join([variant["engine"], *memory, *["graph"] * variant["graph"]])
        fault = order["faults"].get(name, "")
        if rank == 0:
            write(variant=name, begun=time.time())
        while rank and f'"{name}", "begun"' not in (folder / "rank0.jsonl").read_text():
            time.sleep(0.01)
        if fault == "raise" and rank == order["ranks"] - 1:
            write(variant=name, error="of its own", traceback="")
            sys.exit(1)
        if fault == "exit" and rank == order["ranks"] - 1:
            os._exit(3)
        if fault in ("hang", "raise", "exit"):
            time.sleep(100)
        if fault == "abort":
            os.abort()
        if rank == 0:
            write(variant=name, ms=[1.0], pid=os.getpid())
"""
NAMED = {
    variant.name: variant
    for variant in (
        Variant(PLAIN),
        Variant(SHARDWRIGHT),
        Variant(SHARDWRIGHT, "arena"),
        Variant(SHARDWRIGHT, graph=True),
        Variant(SHARDWRIGHT, "arena", graph=True),
    )
}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(crew, "GRACE", 1.0)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def measured(program: Path, ranks: int, seconds: float, **faults: str) -> dict[str, Any]:
    row = Row("row", "1B", 4096, tuple(NAMED.values()))
    order = {"ranks": ranks, "faults": faults}
    return run_row(row, program, order, dict(os.environ), seconds)


@pytest.mark.parametrize("ranks", [1, 2])
def test_variants_with_a_graph_have_processes_of_their_own(program: Path, ranks: int) -> None:
    result = measured(program, ranks, 60)
    pids = {line["variant"]: line["pid"] for line in result["lines"] if "ms" in line}
    assert set(pids) == set(NAMED) and result["error"] == ""
    assert len({pids[name] for name, variant in NAMED.items() if not variant.graph}) == 1
    assert len({*pids.values()}) == 3


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fault", ["abort", "hang", "raise", "exit"])
@pytest.mark.parametrize("name", [PLAIN, "shardwright arena", "shardwright arena graph"])
def test_a_variant_is_blamed_and_the_others_are_measured(
    program: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, fault: str, name: str
) -> None:
    if fault == "hang":
        monkeypatch.setattr(crew, "ONE_TURN", 0.05)
    result = measured(program, ranks, 60, **{name: fault})
    assert {line["variant"] for line in result["lines"] if "ms" in line} == {*NAMED} - {name}
    errors = [(line["variant"], line["error"]) for line in result["lines"] if "error" in line]
    assert [variant for variant, _ in errors] == [name]
    words = {
        "abort": "aborted by SIGABRT",
        "hang": "hung: not done after",
        "raise": "of its own",
        "exit": "status 3",
    }
    assert words[fault] in errors[0][1]
    assert result["error"] == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_variant_that_the_whole_run_s_deadline_cuts_has_not_hung(program: Path, ranks: int) -> None:
    """The row's own limit is 90 seconds."""
    result = measured(program, ranks, 25, shardwright="hang")
    (line,) = [line for line in result["lines"] if "cut" in line or "error" in line]
    assert line["variant"] == "shardwright" and "cut by the deadline after" in line["cut"]
    row = Row("row", "1B", 4096, tuple(NAMED.values()))
    without_figures = result | {"lines": [line for line in result["lines"] if "ms" not in line]}
    summary = verdicts.summary(row, without_figures, None)
    assert verdicts.problems({"row": summary}) == []
    found = summary["variants"]["shardwright"]
    assert verdicts.reason_of(found) == line["cut"] and "Current thread" in found["output"]


@pytest.mark.parametrize("fault", ["shardwright", "shardwrigth=hang", "shardwright=hnag"])
def test_a_fault_that_does_not_exist(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--only", "1B", "--inject", fault, "--out", str(tmp_path)]) == 2
    assert f"--inject {fault!r}: expected VARIANT=FAULT" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_failure_before_every_variant_is_the_rows(program: Path) -> None:
    result = measured(program, 1, 60, start="x")
    assert result["error"] == "failed with status 1: ValueError: before any variant"
    assert "Traceback" in result["output"] and result["lines"] == []
    summary = verdicts.summary(Row("row", "1B", 4096, tuple(NAMED.values())), result, None)
    assert summary["error"] == result["error"]


# -- how a process ended

ENDINGS = {
    "import time; print('begun'); time.sleep(60)": "hung: not done after 2 s, in <module> (<string>:1)",
    "import os; os.abort()": "aborted by SIGABRT, in <module> (<string>:1)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL from outside",
    "import ctypes; ctypes.string_at(0)": "aborted by SIGSEGV, in string_at (__init__.py",
    "raise SystemExit(7)": "failed with status 7: no output",
    "print('last words'); raise SystemExit(7)": "failed with status 7: last words",
    "raise ValueError('x')": "failed with status 1: ValueError: x",
    "try: 1 / 0\nexcept Exception as e: raise ValueError('later') from e": "status 1: ZeroDivisionError: division",
    "pass": "",
}


@pytest.mark.parametrize("code", ENDINGS)
def test_endings(code: str, tmp_path: Path) -> None:
    process = start([sys.executable, "-c", code], tmp_path / "log", dict(os.environ), tmp_path)
    status = None
    deadline = time.monotonic() + 120
    while "sleep" in code and "begun" not in output_of(tmp_path / "log"):
        assert process.poll() is None and time.monotonic() < deadline
    if "sleep" not in code:
        status = process.wait(60)
    end([process])
    found = ending(status, 2.0, output_of(tmp_path / "log"))
    assert found.find(ENDINGS[code]) >= 0 and bool(found) == bool(ENDINGS[code]), found


def test_a_process_that_ignores_the_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what it started."""
    monkeypatch.setattr("benchmarks.gpu_rows.processes.STACK_SECONDS", 0.5)
    code = (
        "import signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "signal.signal(signal.SIGABRT, signal.SIG_IGN)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    process = start([sys.executable, "-c", code], tmp_path / "log", dict(os.environ), tmp_path)
    while not (text := output_of(tmp_path / "log")).strip():
        assert process.poll() is None
    end([process])
    assert process.returncode == -9
    state = Path(f"/proc/{int(text)}/stat")
    deadline = time.monotonic() + 20
    while state.exists() and ") Z " not in state.read_text():
        assert time.monotonic() < deadline


def test_long_output_keeps_both_ends(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("begin" + "x" * 10_000 + "end")
    text = output_of(tmp_path / "log", 1000)
    assert (
        text.startswith("beginx")
        and text.endswith("xend")
        and "characters left out" in text
        and len(text) < 1100
    )


def test_the_first_error_of_a_chain_is_named_first() -> None:
    """Causes, contexts, and a context that ``from None`` hides."""
    try:
        try:
            try:
                raise KeyError("first")
            finally:
                raise ValueError("second")
        except ValueError as error:
            raise RuntimeError("third\nException raised from a C++ file\nframe #0") from error
    except RuntimeError as error:
        assert [type(each) for each in chain_of(error)] == [KeyError, ValueError, RuntimeError]
        line = described(error)["error"]
        assert line.startswith("KeyError: 'first' (test_gpu_failures.py:") and "frame #0" not in line
        assert ", which led to RuntimeError: third (test_gpu_failures.py:" in line
        assert "frame #0" in described(error)["traceback"]
    try:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError("alone") from None
    except ValueError as error:
        assert len(chain_of(error)) == 1
