"""Work of the trainer on GPUs only, with stand-ins for the graph and for the allocator's history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.engine.comm import use_streams
from shardwright.train.commands import train
from shardwright.train.parallel import world
from shardwright.train.report import jsonl
from shardwright.train.step.account import memory_report
from shardwright.train.step.trainer import Trainer
from tests.support.replay import CpuGraphs
from tests.train.kit.jobs import config_file, train_here


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (train, world):
        monkeypatch.setattr(module, "check_device", lambda config, kind: None)


def losses(folder: Path) -> list[tuple[float, float, float | None]]:
    records = jsonl.read_records(folder / "metrics.jsonl")
    return [(r["loss"], r["grad_norm"], r.get("validation_loss")) for r in records]


@pytest.mark.extensive("both ways of accumulating")
@pytest.mark.parametrize("accumulate", ["communicate", "hold"])
def test_steps_in_a_graph_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: str
) -> None:
    options: list[Any] = ["--parallel.engine", "shardwright", "--train.accumulate", accumulate]
    assert train_here(config_file(tmp_path), "--run.dir", tmp_path / "plain", *options) == 0
    replays = []
    capture = CpuGraphs.capture

    def counted(self: CpuGraphs, function: Any) -> Any:
        replay, result = capture(self, function)
        return lambda: (replays.append(1), replay()), result

    monkeypatch.setattr(CpuGraphs, "capture", counted)
    graph = ["--run.dir", tmp_path / "graph", *options, "--train.cuda_graph", "true"]
    with use_streams(torch.device("cpu"), CpuGraphs()):
        assert train_here(config_file(tmp_path), *graph) == 0
    assert len(replays) == 5  # of eight steps, after three as they are
    assert losses(tmp_path / "graph") == losses(tmp_path / "plain")


@pytest.mark.extensive("a large file is written and read")
def test_memory_history_of_the_steps_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(memory_report, "record_memory_history", seen.append)
    monkeypatch.setattr(memory_report, "dump_memory_history", lambda path: Path(path).write_text("history"))
    run = tmp_path / "run"
    assert train_here(config_file(tmp_path), "--run.dir", run, "--train.memory_snapshot", "[2, 7]") == 0
    assert seen == [True, False, True, False]
    names = sorted(path.name for path in (run / "memory_history").iterdir())
    assert names == ["step_2_rank_0.pickle", "step_7_rank_0.pickle"]


def test_memory_history_of_a_step_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_report, "record_memory_history", lambda wanted: None)
    monkeypatch.setattr(memory_report, "dump_memory_history", lambda path: Path(path).write_text("history"))

    def out_of_memory(self: Trainer, *tensors: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(Trainer, "_verified_if_due", out_of_memory)
    run = tmp_path / "run"
    status = train_here(config_file(tmp_path), "--run.dir", run, "--train.memory_snapshot", "[1]")
    assert status == 1 and (run / "memory_history" / "step_1_rank_0.pickle").exists()
