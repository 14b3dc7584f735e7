"""``shardwright doctor --measure``: failures and limits of time of measurements, and one real run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.doctor import devices, folders, links, measurements
from shardwright.cli.doctor.children import Unmeasured, measure_in_children
from shardwright.cli.doctor.findings import Finding, unmeasured

ROOT = Path(__file__).resolve().parents[3]
SUBJECTS = ["devices", "gloo", "memory", "shared memory", "folder"]
LATE = "not measured: it did not end within"
"""A measurement on a machine on which many other programs run may end so, and that is all it may do."""
ON_CPU = {
    "torch": {"version": "2.13", "devices": [], "backends": {"gloo": True, "nccl": True}},
    "memory": {"total": 8, "available": 8, "limit": None, "limit_used": None},
    "shared_memory": {"path": "/dev/shm", "total": 2**40, "free": 2**40, "error": None},
}


def fails(reason: str) -> Any:
    def measurement(*_: Any, **__: Any) -> Any:
        raise Unmeasured(reason)

    return measurement


def test_a_measurement_that_does_not_end_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its limit so short that Python has hardly started."""
    monkeypatch.setattr(folders, "SECONDS", 0.05)
    begin = time.monotonic()
    finding = folders.find_folder(tmp_path)
    assert time.monotonic() - begin < 5
    assert re.match(r"not measured: it did not end within 0.05 s", finding.found)
    assert "put the run on another disk" in finding.advice
    assert list(tmp_path.iterdir()) == []


def killed_in(place: str) -> None:
    folder = Path(place)
    folder.mkdir()
    (folder / "large").write_bytes(b"x")
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_measurement_left_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setattr(folders, "measure_folder", killed_in)
    assert "signal 9" in folders.find_folder(tmp_path).found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing() -> None:
    finding = folders.find_folder(Path("/no/such/folder"))
    assert "no such folder" in finding.found and "--folder" in finding.advice


def test_a_folder_is_measured_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_BYTES", 2**20)
    monkeypatch.setattr(folders, "FIRST_BYTES", 2**16)
    figures = folders.measure_folder(str(tmp_path / "place"))
    assert figures["write"] > 0 and figures["read"] > 0 and figures["free"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_link_that_fails(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "RuntimeError: [enforce fail at /a/b.cc:84] ifa. Unable to find address for: eth7"
    monkeypatch.setattr(links, "measure_in_children", fails(reason))
    finding = links.find_link(backend, ON_CPU["torch"])
    assert finding.found == "not measured: RuntimeError: ifa. Unable to find address for: eth7"
    assert "GLOO_SOCKET_IFNAME" in finding.advice or "NCCL_DEBUG" in finding.advice


def test_a_link_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SECONDS", 0.05)
    finding = links.find_link("gloo", ON_CPU["torch"])
    assert finding.found == "not measured: it did not end within 0.05 s"
    assert "end other programs" in finding.advice


def test_gpus_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "measure_in_children", fails("it did not end within 25 s"))
    (finding,) = devices.find_devices(2)
    assert "did not end within 25 s" in finding.found and "Xid" in finding.advice
    assert devices.find_devices(0)[0].found.startswith("no GPU")


def test_an_unexpected_error_is_a_line_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("no")

    good = Finding("gloo", "fine")
    monkeypatch.setattr(measurements, "find_devices", broken)
    monkeypatch.setattr(measurements, "find_link", lambda *_: good)
    monkeypatch.setattr(
        measurements, "find_folder", lambda _: unmeasured("folder", "it took too long", "wait")
    )
    found = measurements.measure(ON_CPU, Path("."))
    assert [each.subject for each in found] == SUBJECTS
    assert found[0].found == "not measured: ZeroDivisionError: no"
    text = measurements.text_of_findings(found)
    assert re.search(r"^folder +not measured: it took too long\n +-> wait$", text, re.M)
    assert re.search(r"^measured +\d+ of 5 lines have advice", text, re.M)
    assert "nothing to do" in measurements.text_of_findings([good])


@pytest.mark.parametrize(
    ("torch", "gpus", "expected"),
    [
        ({"version": None}, 0, {"gloo": "cannot be imported"}),
        ({"backends": {}}, 0, {"gloo": "has no gloo"}),
        ({"backends": {}}, 2, {"gloo": "has no gloo", "NCCL": "has no NCCL"}),
    ],
)
def test_only_what_is_there_is_measured(
    torch: dict[str, Any], gpus: int, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "find_devices", lambda _: [])
    monkeypatch.setattr(measurements, "find_folder", lambda _: Finding("folder", "fine"))
    report = ON_CPU | {"torch": {"version": "2.13", "devices": [{}] * gpus} | torch}
    found = {each.subject: each.found for each in measurements.measure(report, Path("."))}
    assert found.keys() == {*SUBJECTS, *expected} - {"devices"}
    assert all(text in found[subject] for subject, text in expected.items())


def test_sigterm_removes_what_a_measurement_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "place"

    def stopped(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(time, "sleep", stopped)
    with pytest.raises(SystemExit, match="143"), measurements.exit_at_sigterm():
        measure_in_children(folders.measure_folder, [(str(place),)], 30)
    assert not place.exists() and signal.getsignal(signal.SIGTERM) == before


def environment_of_child() -> dict[str, Any]:
    return dict(os.environ)


def test_the_process_of_a_measurement_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "RANDOM_SEED"):
        monkeypatch.setenv(name, "1")
    (environment,) = measure_in_children(environment_of_child, [()], 30)
    assert not {"RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(environment)
    assert environment["RANDOM_SEED"] == "1"


def test_the_reason_of_a_process_that_fails() -> None:
    with pytest.raises(Unmeasured, match=r"Permission denied|No such file"):
        measure_in_children(folders.measure_folder, [("/proc/shardwright",)], 30)


# ------------------------------------------------------------------------------
# Real runs


def run(*command: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")} | variables
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.extensive("it measures, in processes of its own")
def test_all_is_measured_on_this_machine(tmp_path: Path) -> None:
    printed = run("-m", "shardwright", "doctor", "--measure", "--json", "--folder", str(tmp_path))
    report = json.loads(printed)
    found = {each["subject"]: each for each in report["measured"]}
    assert set(SUBJECTS) - {"devices"} <= set(found)
    assert all(set(each) == {"subject", "found", "advice", "figures"} for each in found.values())
    if not found["gloo"]["found"].startswith(LATE):
        assert found["gloo"]["figures"]["all_gather_bytes_per_second"] > 1e6
        assert 0 < found["gloo"]["figures"]["all_reduce_seconds"] < 1
    if not found["folder"]["found"].startswith(LATE):
        assert found["folder"]["figures"]["write"] > 0
    assert report["torch"]["version"] and "problems" in report
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extensive("it measures, in processes of its own")
def test_the_first_rank_of_torchrun_measures_its_machine(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    printed = run(*torchrun, "shardwright", "doctor", "--measure", "--folder", str(tmp_path))
    assert len(re.findall(r"^gloo ", printed, re.M)) == 1  # the first rank alone prints
    assert len(re.findall(r"^hosts +all ranks are on one host", printed, re.M)) == 1


@pytest.mark.extensive("processes of their own")
def test_without_torch_the_rest_is_measured(tmp_path: Path) -> None:
    broken = "import sys; sys.modules['torch'] = None; from shardwright.cli import main; sys.exit(main())"
    text = run("-c", broken, "doctor", "--measure", "--folder", str(tmp_path))
    assert re.search(r"^gloo +not measured: torch cannot be imported$", text, re.M)
    assert re.search(rf"^folder +(\w+: writes|{LATE})", text, re.M)
