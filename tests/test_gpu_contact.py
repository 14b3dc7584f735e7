"""``make gpu`` on the CPU: its parts, its table and its files, and that each failure is reported as what it is."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools import gpu
from tools.gpu import GROUPS, TRAINER_TESTS, Part

ROOT = Path(__file__).resolve().parent.parent


def test_failures_on_purpose_are_reported_as_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hang, an abort, a chain of errors and a failed capture, beside a part that is well."""
    names = [f"fault-{name}" for name in ("hang", "abort", "chain", "capture")]
    only = ",".join([*names, "versions", "graph"])
    assert gpu.main(["--device", "cpu", "--only", only, "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.txt"]
    results = json.loads((tmp_path / "gpu.json").read_text())
    parts = {each["name"]: each for each in results["parts"]}
    assert set(parts) == {*names, "versions", "graph"} and results["problems"] == []
    assert {parts[name]["verdict"] for name in names} == {"reported rightly"}
    assert torch.__version__ in parts["versions"]["found"]
    assert parts["graph"]["found"] == "10 losses have the same bits"
    text = (tmp_path / "gpu.txt").read_text()
    for line in (
        r"hung: not done after",
        "called from hang (faults.py:",
        "aborted by SIGABRT, in abort (faults.py:",
        "ValueError: the first error of the chain (faults.py:",
        "which led to RuntimeError: the last error of the chain",
        "failed: RuntimeError: operation not permitted when stream is capturing",
        "Current thread",  # stacks of what hung and aborted
        "Traceback (most recent call last):",
        "operation failed due to a previous error during capture",  # the whole chain
        "verdict: all is well",
    ):
        assert line in text, line
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == f"results: {tmp_path / 'gpu.txt'} and gpu.json"
    assert shown.partition("results:")[0].splitlines()[2:] == text.splitlines()[2 : shown.count("\n") - 1]


CODES = {
    "a failure": ("raise SystemExit('an error of its own')", "failed with status 1: an error of its own"),
    "an abort": ("import os; os.abort()", "aborted by SIGABRT"),
    "a hang": ("import time; time.sleep(60)", "hung: not done after"),
}


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The status and the parts of a run of these parts."""

    def run(parts: list[Part], *options: str) -> tuple[int, str]:
        monkeypatch.setattr(gpu, "stages", lambda *_: [parts, [Part("last", [sys.executable, "-c", ""])]])
        status = gpu.main(["--device", "cpu", "--out", str(tmp_path), *options])
        return status, (tmp_path / "gpu.txt").read_text()

    return run


@pytest.mark.parametrize("name", CODES)
def test_a_part_that_fails_does_not_end_the_others(run_of, name: str) -> None:  # type: ignore[no-untyped-def]
    code, line = CODES[name]
    parts = [Part(name, [sys.executable, "-c", code], limit=2.0), Part("well", [sys.executable, "-c", ""])]
    status, text = run_of(parts)
    assert status == 1 and parts[0].verdict.startswith(line)
    assert parts[1].verdict == "ok" and f"verdict: failed: {name}\n" in text


@pytest.mark.parametrize("name", CODES)
def test_a_failure_on_purpose_that_is_reported_as_another_is_a_problem(run_of, name: str) -> None:  # type: ignore[no-untyped-def]
    code, line = CODES[name]
    wrong = next(other for _, other in CODES.values() if other != line)
    parts = [
        Part("right", [sys.executable, "-c", code], limit=2.0, expected=(line,)),
        Part("wrong", [sys.executable, "-c", code], limit=2.0, expected=(wrong,)),
        Part("well", [sys.executable, "-c", ""], expected=(line,)),
    ]
    status, text = run_of(parts)
    assert status == 1 and "verdict: failed: wrong, well\n" in text
    assert [each.verdict.partition(":")[0] for each in parts] == ["reported rightly"] + [
        "reported wrongly"
    ] * 2


def test_after_the_deadline_parts_are_left_out(run_of) -> None:  # type: ignore[no-untyped-def]
    parts = [Part("slow", [sys.executable, "-c", "import time; time.sleep(60)"])]
    status, text = run_of(parts, "--seconds", "6")
    assert status == 1 and parts[0].verdict.startswith("cut by the deadline after")
    assert "verdict: failed: slow, last" in text and "left out: no time" in text


def test_late_parts_are_ended_together(run_of, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Each takes all the seconds that a process has for its stacks."""
    monkeypatch.setattr("benchmarks.gpu_rows.processes.STACK_SECONDS", 3.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    code = "import signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(120)"
    parts = [Part(f"slow {i}", [sys.executable, "-c", code], limit=60.0) for i in range(8)]
    begun = time.monotonic()
    status, _ = run_of(parts, "--seconds", "8")
    assert status == 1 and all(each.verdict.startswith("cut by the deadline") for each in parts)
    assert time.monotonic() - begun < 8 + 12


SKIPS = "import pytest\n@pytest.mark.skipif({}, reason='needs two: GPUs')\n@pytest.mark.gpu\ndef test_it(): pass\n"


@pytest.mark.parametrize("others", [0, 1])
def test_a_group_whose_tests_are_all_skipped_is_not_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """On a GPU: without one all tests of a GPU are."""
    path = tmp_path / "test_it.py"
    path.write_text(SKIPS.format(True) + "def test_that(): pass\n" * others)
    part = gpu.group("it", (str(path), "-c", "/dev/null", "-m", "gpu or not gpu"))
    monkeypatch.setattr(gpu, "stages", lambda *_: [[part]])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    status = gpu.main(["--device", "cuda", "--out", str(tmp_path)])
    assert (status, part.verdict) == ((0, "ok") if others else (1, "skipped: needs two: GPUs"))
    assert "1 skipped" in part.found


def test_it_ends_what_it_started_when_it_is_ended(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "tools/gpu.py",
        "--device",
        "cpu",
        "--only",
        "fault-hang",
        "--out",
        str(tmp_path),
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    def parts() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(path.read_text().rpartition(") ")[2].split()[1])
            except OSError:
                continue
            found += [int(path.parent.name)] if parent == process.pid else []
        return found

    while not (started := parts()):
        assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 143
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_an_unknown_part_and_no_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert gpu.main(["--device", "cpu", "--only", "graph,grahp", "--out", str(tmp_path)]) == 2
    assert "no part is called 'grahp'" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert not [*tmp_path.iterdir()]


def gpu_tests() -> set[tuple[str, str]]:
    """The files and names of tests with the mark gpu, their own or their module's."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        source = path.read_text()
        if "mark.gpu" not in source:
            continue
        tree = ast.parse(source)
        whole = any(
            isinstance(node, ast.Assign)
            and "mark.gpu" in ast.unparse(node)
            and "pytestmark" in ast.unparse(node)
            for node in tree.body
        )
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            if whole or any("mark.gpu" in ast.unparse(each) for each in node.decorator_list):
                found.add((str(path.relative_to(ROOT)), node.name))
    return found


def test_each_gpu_test_is_in_a_group() -> None:
    """In a file with several groups, -k of one of them chooses the test. Parameters choose among memory's kinds."""
    tests = gpu_tests()
    assert len(tests) >= 12
    for file, name in tests:
        groups = [arguments for arguments in GROUPS.values() if arguments[0] == file]
        if file in TRAINER_TESTS:
            continue
        assert groups, file
        words = {"dynamic", "max_pool", "arena"}
        chosen = [
            arguments
            for arguments in groups
            if len(arguments) == 1
            or any(
                all(word in name or word in words for word in clause.split(" and "))
                for clause in arguments[2].split(" or ")
            )
        ]
        assert chosen, (file, name)


def test_the_parts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [[each.name for each in parts] for parts in gpu.stages("cuda", False, [])]
    assert names[1] == ["plain"]  # first alone
    with_nccl = {"nccl", "nccl-waits", "nccl-arena", "nccl-graph", "nccl-graph-arena"}
    assert set(names[2]) == {"bf16", "waits", "graph", "arena", "graph-arena"} | with_nccl
    assert {f"tests: {name}" for name in GROUPS} <= set(names[3]) and "trainer" in names[3]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    without = {each.name: each.verdict for each in gpu.stages("cuda", False, [])[3]}
    assert without["tests"] == "not tried: this Python has no pytest"
    assert without["trainer"].startswith("not tried: it needs matplotlib, psutil, pydantic, rich")


@pytest.mark.parametrize("name", ["graph-arena", "nccl-waits"])
def test_parts_need_pytorch_alone(name: str) -> None:
    """The machine of a first contact has few packages, and perhaps no pytest."""
    path = str(ROOT / "tools" / "gpu_parts.py")
    program = "import runpy, sys; sys.modules['pytest'] = None; sys.argv[:] = sys.argv[1:]"
    program += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", program, path, name, "--device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and '"found"' in done.stdout, done.stdout + done.stderr
