"""`shardwright calibrate`: what it measures, the file that it writes, and mistakes in one line. No real times here."""

from __future__ import annotations

import multiprocessing
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.cli import main
from shardwright.planner import Kernel, Kind, Step, work_of
from shardwright.planner.measured import key_of
from shardwright.planner.tracing import Operation, Timer, noting
from shardwright.train.commands import calibrate
from shardwright.train.errors import UserError
from shardwright.train.planning import measuring
from shardwright.train.planning.programs import traced_program
from shardwright.train.planning.small_jobs import Task, configured, job, training

SMALL = job(96, 160, 256, 64, 1, layers=1)
TINY = Task((SMALL,), (SMALL, job(96, 160, 256, 64, 1, layers=2)), (4096,))


class FixedTimer(Timer):
    """A clock of which each call takes a drawn time, which is the same in each test."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__(torch.device("cpu"))
        self.draw = random.Random(0)
        self.noise = noise

    def repeated(self, run: Callable[[], object], least: int = 1) -> float:
        run()
        return 1e-5 * (1 + self.noise * self.draw.randrange(7))

    once = repeated


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[float], None]]:
    """Measure a tiny task with one rank, here. The function says how much measurements differ."""
    noise = 0.0

    def by_ranks(task: Task, ranks: int, kind: Kind) -> list[dict[str, Any]]:
        assert (ranks, kind) == (1, "cpu")
        (tmp_path / "store").unlink(missing_ok=True)
        threads = torch.get_num_threads()
        try:
            return [measuring.measure(task, 0, 1, kind, str(tmp_path), FixedTimer(noise))]
        finally:
            torch.set_num_threads(threads)

    def differ(by: float) -> None:
        nonlocal noise
        noise = by

    monkeypatch.setattr(calibrate, "measured_by_ranks", by_ranks)
    monkeypatch.setattr(calibrate, "ON_CPU", TINY)
    monkeypatch.setattr(measuring, "_step", lambda config, *_: 0.02 * config.model.shape().n_layers)
    yield differ


def operations(values: dict[str, Any], ranks: int) -> tuple[dict[Kernel, Operation], Step]:
    found: dict[Kernel, Operation] = {}
    config = configured(values, ranks)
    return found, Step.of(traced_program(config, ranks, "cpu", lambda recorder: noting(recorder, found)))


@pytest.mark.parametrize(
    "values",
    [
        SMALL,
        {**SMALL, "parallel": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
        {"model": {"kind": "hybrid", "preset": "debug"}, **training(64, 2)},
    ],
    ids=["llama", "bfloat16", "hybrid"],
)
def test_every_kernel_of_a_step_has_an_operation_that_runs_alone(values: dict[str, Any]) -> None:
    found, step = operations(values, 2)
    kinds = {"communication", "nothing"}
    missing = [kernel for kernel, work in step.kernels if work.kind not in kinds and kernel not in found]
    assert not missing
    device = torch.device("cpu")
    for kernel, operation in found.items():
        arguments, keywords = operation.tensors(device)
        tensors: list[torch.Tensor] = []
        _collect((arguments, keywords), tensors)
        assert tuple(tuple(each.shape) for each in tensors[:1]) == kernel.shapes[: len(tensors[:1])]
        with torch.no_grad():
            operation.function(*arguments, **keywords)


def test_groups_of_products_cover_all_rows_and_all_sums() -> None:
    found, _ = operations({"model": {"kind": "hybrid", "preset": "debug"}, **training(64, 2)}, 2)
    dimensions = set()
    for kernel, operation in found.items():
        if kernel.name == "_grouped_mm":
            (one, other, ends, *_), _ = operation.tensors(torch.device("cpu"))
            assert int(ends[-1]) == (one.shape[1] if other.dim() == 2 else one.shape[0])
            dimensions.add(other.dim())
    assert dimensions == {2, 3}


def _collect(tree: Any, into: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        into.append(tree)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            _collect(each, into)
    elif isinstance(tree, dict):
        _collect(list(tree.values()), into)


def test_a_file_whose_plans_have_its_times(
    in_this_process: Callable[[float], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.toml"
    assert main(["calibrate", "--device", "cpu", "--nproc", "1", "--out", str(out)]) == 0
    words = capsys.readouterr().out
    assert f"shardwright plan JOB.toml --on 1x{out}" in words and "us for an operation" in words
    values = tomllib.loads(out.read_text())
    assert values["kind"] == "cpu" and values["source"].startswith("shardwright calibrate, 2")
    kernels = values["measured"]["kernels"]
    found, step = operations(SMALL, 1)
    for kernel in found:
        work = work_of(kernel)
        table = f"{kernel.name} {kernel.dtype}" if work.kind in ("products", "attention") else key_of(kernel)
        assert any(row[-1] == pytest.approx(1e-5) for row in kernels[table])
    job = tmp_path / "job.toml"
    config = configured(SMALL, 1)
    job.write_text(config.to_toml())
    assert main(["plan", str(job), "--on", f"1x{out}", "--no-cache", "--no-edits"]) == 0
    plan = capsys.readouterr().out
    assert "tokens/s on each device" in plan and "Python and PyTorch" in plan and "CPU-hours" in plan
    # The job's own steps were measured, and its plan has their time: kernels, and the rest as the host's.
    counted = sum(1 for each in step.events if hasattr(each, "number"))
    host = values["measured"]["host"]["host"]
    assert counted * (host + 1e-5) == pytest.approx(0.02, rel=0.3)
    # Again: nothing is lost without --force.
    before = out.read_text()
    assert main(["calibrate", "--device", "cpu", "--nproc", "1", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "exists already" in error and "--force" in error and out.read_text() == before
    in_this_process(0.5)
    assert main(["calibrate", "--device", "cpu", "--nproc", "1", "--out", str(out), "--force"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "repeated measurements" in error and "other programs" in error
    assert out.read_text() == before
    again = ["calibrate", "--device", "cpu", "--nproc", "1", "--out", str(out), "--force", "--most", "9"]
    assert main(again) == 0 and out.read_text() != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "mine.json"], "--out: expected the path of a .toml file, found 'mine.json'"),
        (["--out", "no/such/mine.toml"], "--out: expected a file in a folder that is there"),
        (["--device", "cpu", "--nproc", "100000"], "--nproc: expected at most the "),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--most", "-1"], "expected a number >= 0"),
        (["here.toml"], "calibrate: unexpected argument 'here.toml'"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--device", "cuda"]) == 2
    assert "--device: expected a CUDA device, found none" in capsys.readouterr().err


def test_a_rank_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forks = multiprocessing.get_context("fork")  # at once, where a new process would import PyTorch
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forks)
    broken = Task(({"model": {"kind": "llama", "dim": -1}, **training(64, 1)},), (), ())
    with pytest.raises(UserError, match=r"calibrate: rank 0 failed: UserError: .*model.dim"):
        calibrate.calibrate(tmp_path / "mine.toml", 1, "cpu", task=broken)
    assert not list(tmp_path.iterdir())
