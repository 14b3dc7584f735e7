"""`[run] plan`: a job that does not fit is warned of or refused, and figures of its plan come back at the end.

The GPU is a file. A run on the CPU does not measure what a GPU would reserve, so that line is made from a number here.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwright.train.launch import forecast
from shardwright.train.run.folder import RunFolder
from tests.train.kit.jobs import config_file, ranks, train_here


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(forecast, "SECONDS", 300.0)  # a loaded machine takes longer than a start waits
    return config_file(tmp_path)


def device(folder: Path, gib: float) -> Path:
    path = folder / f"gib{gib}.toml"
    path.write_text(f"gib = {gib}\n")
    return path


def train(job: Path, plan: str, gib: float, more: str = "") -> tuple[int, RunFolder]:
    """The status of a run of two steps with a plan for such a GPU, and its folder."""
    run = job.parent / "run"
    words = ("--run.plan", plan, "--run.plan_device", str(device(job.parent, gib)), "--run.dir", str(run))
    return train_here(job, *words, "--train.steps", "2", *more.split()), RunFolder(run)


def test_a_job_that_fits_runs_and_has_its_plan(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, folder = train(job, "refuse", 80)
    assert status == 0
    assert "warning" not in capsys.readouterr().err
    figures = json.loads(forecast.plan_file(folder).read_text())
    assert figures["fits"] == "yes"
    (line,) = forecast.note_reserved(folder, figures["reserved_bytes"] * 2)
    assert line.split()[0] == "plan" and "-50.0%" in line
    (line,) = forecast.note_out_of_memory(folder)
    assert "GiB reserved of" in line and ".py:" in line


def test_a_job_that_does_not_fit_is_refused_if_asked(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The runtime of a GPU takes up to 2.8 GiB, or 0.6 GiB on one rank."""
    status, folder = train(job, "refuse", 0.6)
    error = capsys.readouterr().err
    assert status == 2 and len(error.splitlines()) == 1
    assert "run.plan: this job does not fit" in error and "shardwright plan" in error
    assert not folder.exists()


def test_a_job_that_does_not_fit_runs_with_a_warning(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = train(job, "warn", 0.6)
    error = capsys.readouterr().err
    assert status == 0
    assert error.count("warning: this job does not fit into the memory of its GPUs, by its plan: ") == 1


def test_a_job_that_needs_more_memory_of_the_host_is_refused(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=1000))
    monkeypatch.setattr(forecast, "psutil", memory)
    words = "--activations.offload blocks --parallel.engine shardwright --parallel.offload cpu"
    status, _ = train(job, "warn", 80, words)
    error = capsys.readouterr().err
    assert status == 2 and len(error.splitlines()) == 1
    assert "of the host's memory, by its plan, and this machine has 0.00: each of its 1 ranks here" in error


def test_a_job_whose_exact_figures_exceed_the_gpu_is_refused(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = train(job, "warn", 0.00001)
    error = capsys.readouterr().err
    assert status == 2 and len(error.splitlines()) == 1 and "run.plan" in error


@pytest.mark.parametrize("plan", ["warn", "refuse"])
def test_a_job_without_a_plan(job: Path, plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = job.parent / "run"
    words = (
        "--parallel.engine",
        "ddp",
        "--run.plan",
        plan,
        "--run.plan_device",
        "h100",
        "--run.dir",
        str(run),
    )
    status = train_here(job, *words, "--train.steps", "2")
    error = capsys.readouterr().err
    if plan == "warn":
        assert (status, error) == (0, "")
        return
    assert status == 2 and len(error.splitlines()) == 1
    assert "there is no plan of this job: parallel.engine" in error


def test_the_cpu_has_no_plan_unless_there_is_a_device(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = job.parent / "run"
    assert train_here(job, "--run.dir", str(run), "--train.steps", "2") == 0
    assert not forecast.plan_file(RunFolder(run)).exists()
    capsys.readouterr()
    assert train_here(job, "--run.plan", "warn") == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "run.plan: expected 'auto' or 'off' on the CPU" in error


def test_a_start_does_not_wait_long_for_a_plan(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forecast, "SECONDS", 0.0)
    late: list[str] = []
    monkeypatch.setattr(forecast.Forecast, "_report", lambda self: late.append(self._device))
    status, _ = train(job, "warn", 0.00001)
    assert status == 0  # nobody waited for the plan that refuses it
    assert len(late) == 1 and "warning" not in capsys.readouterr().err


@pytest.mark.extensive("two processes and a plan")
@pytest.mark.parametrize("plan", ["warn", "refuse"])
def test_the_first_rank_of_torchrun_plans(job: Path, plan: str) -> None:
    run = job.parent / "run"
    words = (
        "--run.plan",
        plan,
        "--run.plan_device",
        str(device(job.parent, 0.6)),
        "--parallel.engine",
        "shardwright",
        "--train.steps",
        "300",
    )
    (first, said), (second, silent) = ranks(2, "train", job, *words, "--run.dir", run, timeout=300)
    if plan == "warn":
        assert (first, second, silent) == (0, 0, "")
        assert said.count("warning: this job does not fit") == 1
        assert forecast.plan_file(RunFolder(run)).exists()
        return
    assert (first, second, silent) == (2, 2, "")
    assert said.startswith("error: run.plan: this job does not fit") and said.count("\n") == 1
    assert not run.exists()
