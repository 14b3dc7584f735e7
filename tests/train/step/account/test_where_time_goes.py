"""A run reports its time and its memory: parts of steps, traces, notes of a step, owners after out of memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import profile

from shardwright.engine import heartbeat
from shardwright.train.errors import UserError
from shardwright.train.launch.forecast import shortage_file
from shardwright.train.parallel.checks import check_division
from shardwright.train.report.plots import time_shares
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.account import out_of_memory, step_notes
from shardwright.train.step.account.clock import PARTS
from shardwright.train.step.trainer import Trainer
from tests.train.kit.jobs import config_file, profile_of, ranks, records, run_record, tiny, train_here

SHORT = (
    "--parallel.engine",
    "shardwright",
    "--train.steps",
    "4",
    "--validation.every",
    "0",
    "--run.sample_tokens",
    "0",
)


def names_in(path: Path, category: str = "user_annotation") -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == category]


def test_a_run_divides_its_time_and_traces_the_steps_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train_here(config_file(tmp_path), "--run.dir", run, *SHORT, "--profile.steps", "[2, 3]") == 0
    printed = capsys.readouterr().out
    steps = records(run)
    for step in steps:
        assert step["parts"].keys() == set(PARTS)
        assert sum(step["parts"].values()) == pytest.approx(step["seconds"], rel=0.01)
        assert all(step["parts"][name] > 0 for name in PARTS)
    # Two clocks measure the wait for data, and a busy machine may pause the process between their readings.
    assert min(abs(step["parts"]["data"] - step["data_seconds"]) for step in steps) < 1e-3
    results = run_record(run)["results"]
    assert results["time_shares"] == pytest.approx(time_shares(steps[3:]))
    assert "  time            " in printed and "backward" in printed
    # The trace
    path = profile_of(run, 2, 3, 0)
    assert printed.count(str(path)) == 1 and f"trace of steps 2 to 3: {path}" in printed
    names = names_in(path)
    assert [name for name in names if name.startswith("step ")] == ["step 2", "step 3"]
    assert names.count("forward") == names.count("backward") == 8  # micro-batches of two steps
    assert names.count("all-reduce of the loss") == 2 and names.count("data") == 2
    # The notes of step 3
    notes = json.loads((run / "step_notes.json").read_text())
    assert (notes["step"], notes["rank"], notes["left_out"]) == (3, 0, 0)
    kinds = [notes["kinds"][row[1]] for row in notes["notes"]]
    assert set(kinds) >= {"lease", "release", "begin", "end", "phase"}
    times = [row[0] for row in notes["notes"]]
    assert times == sorted(times) and times[-1] <= steps[2]["seconds"] * 1e6
    assert "layers.0" in notes["names"]


HOOKS = """
import os, signal
import torch
from shardwright.train.extend import TrainerHook
class Once(TrainerHook):
    def setup(self, job): self.job, self.acts = job, True
    def before_step(self, step):
        if step == 3 and self.acts:
            self.acts = False
            self.act()
class NotFinite(Once):
    def act(self):
        layer = next(m for m in self.job.model.modules() if isinstance(m, torch.nn.Linear))
        self.handle = layer.register_forward_hook(self.spoil)
    def spoil(self, module, arguments, result):
        self.handle.remove()
        return result * torch.nan
class Fails(Once):
    def act(self): raise RuntimeError("no more")
class Stopped(Once):
    def act(self): os.kill(os.getpid(), signal.SIGTERM)
"""
REWIND = ("--fault.on_non_finite", "rewind", "--checkpoint.every", "1")
SHORTER = "3 to 3, as it ended before step 4"
#: By name, a hook that acts at the begin of step 3, settings, the status, the traced steps of 3 to 4, and the line.
SPOILED: dict[str, tuple[str, tuple[str, ...], int, list[int], str]] = {
    "rewind": ("NotFinite", REWIND, 0, [3, 3, 4], "3 to 4"),
    "rewind before": ("NotFinite", (*REWIND, "--fault.rewind_steps", "1"), 0, [3], SHORTER),
    "skip": ("NotFinite", ("--fault.on_non_finite", "skip"), 0, [3, 3, 4], "3 to 4"),
    "error": ("Fails", (), 2, [3], SHORTER),
    "signal": ("Stopped", (), 143, [3], SHORTER),
}


@pytest.mark.extensive("a run for each", but=("error",))
@pytest.mark.parametrize("case", SPOILED)
def test_a_trace_names_the_steps_that_it_has(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hook, settings, status, traced, words = SPOILED[case]
    (tmp_path / "spoiling.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    arguments = (*SHORT, *settings, "--run.hooks", f'["spoiling:{hook}"]', "--profile.steps", "[3, 4]")
    assert train_here(config_file(tmp_path), "--run.dir", run, *arguments) == status
    path = profile_of(run, 3, 4, 0)
    assert [int(name.split()[1]) for name in names_in(path) if name.startswith("step ")] == traced
    assert f"trace of steps {words}: {path}; open it" in capsys.readouterr().out
    assert heartbeat.current is None


#: Settings beside a trace. Those of ranks need two.
BESIDE: dict[str, tuple[str, ...]] = {
    "validation": ("--validation.every", "1", "--checkpoint.every", "1"),
    "accumulation": ("--train.micro_batch", "1", "--train.accumulate", "hold"),
    "verified": ("--fault.verify_every", "2"),
    "compiled": ("--train.compile", "eager"),
    "offload": ("--activations.checkpoint", "full", "--activations.offload", "inputs"),
    "context": ("--parallel.context", "2", "--profile.ranks", "[1]"),
    "tensor": ("--parallel.tensor", "2", "--model.n_kv_heads", "2", "--profile.ranks", "[0, 1]"),
}


@pytest.mark.extensive("two runs for each", but=("validation",))
@pytest.mark.parametrize("case", BESIDE)
def test_a_trace_changes_no_number(case: str, tmp_path: Path) -> None:
    settings, count = BESIDE[case], 2 if case in ("context", "tensor") else 1
    found = []
    for steps in ([], [2, 3]):
        run = tmp_path / f"run{len(steps)}"
        arguments = ("--run.dir", run, *SHORT, *settings, "--profile.steps", str(steps))
        if count == 1:
            assert train_here(config_file(tmp_path), *arguments) == 0
        else:
            ended = ranks(count, "train", config_file(tmp_path), *arguments)
            assert not any(status for status, _ in ended), ended
        for step in records(run):
            assert sum(step["parts"].values()) == pytest.approx(step["seconds"], rel=0.01)
        found.append([(step["loss"], step["grad_norm"]) for step in records(run)])
    assert found[0] == found[1]
    names = {"context": ["rank_1"], "tensor": ["rank_0", "rank_1"]}.get(case, ["rank_0"])
    assert sorted(path.name for path in (run / "profile").iterdir()) == [
        f"steps_2_to_3_{name}.json.gz" for name in names
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_parts_add_up_and_ranges_stand_above_kernels(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("--run.dir", run, *SHORT, "--run.device", "cuda", "--profile.steps", "[3, 3]")
    assert train_here(config_file(tmp_path), *arguments) == 0
    for step in records(run)[1:]:
        assert sum(step["parts"].values()) == pytest.approx(step["seconds"], rel=0.01)
        assert step["parts"]["forward"] > 0 and step["parts"]["backward"] > 0
    assert {"step 3", "forward"} <= {*names_in(profile_of(run, 3, 3, 0), "gpu_user_annotation")}


@pytest.mark.extensive("a file of each rank")
def test_each_rank_writes_a_trace_with_the_names_of_units(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("--run.dir", run, *SHORT, "--profile.steps", "[2, 2]", "--profile.ranks", "all")
    ended = ranks(2, "train", config_file(tmp_path), *arguments)
    assert [status for status, _ in ended] == [0, 0], ended
    for rank in range(2):
        names = names_in(profile_of(run, 2, 2, rank))
        assert {"prefetch: all-gather of layers.1", "wait: reduce-scatter of layers.0", "forward"} <= {*names}
    parts = [step["parts"] for step in records(run)]
    assert all(part["communication"] > 0 for part in parts)


def test_a_profiler_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(profile, "start", fail)
    monkeypatch.setattr(step_notes, "NOTED", 1)
    monkeypatch.setattr(step_notes, "MOST", 10)
    run = tmp_path / "run"
    arguments = (*SHORT, "--train.steps", "2", "--profile.steps", "[1, 2]")
    assert train_here(config_file(tmp_path), "--run.dir", run, *arguments) == 0
    printed = capsys.readouterr()
    assert (
        printed.err.count("warning: the profiler of this rank has stopped, and training goes on: Runtime")
        == 1
    )
    assert "trace of" not in printed.out and not (run / "profile").exists()
    notes = json.loads((run / "step_notes.json").read_text())
    assert len(notes["notes"]) == 10 and notes["left_out"] > 10


def test_the_error_of_a_rank_without_memory_names_owners_and_three_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backward = Trainer._verified_if_due

    def out_of_memory(self: Trainer, *tensors: Any) -> Any:
        if self.position.step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return backward(self, *tensors)

    monkeypatch.setattr(Trainer, "_verified_if_due", out_of_memory)
    run = tmp_path / "run"
    assert train_here(config_file(tmp_path), "--run.dir", run, *SHORT) == 1
    error = capsys.readouterr().err
    (owners,) = (line for line in error.splitlines() if line.startswith("memory of rank 0 by owner"))
    assert "after the error of step 2: " in owners and "KiB optimizer state" in owners
    assert "KiB shards of parameters" in owners
    (settings,) = (line for line in error.splitlines() if line.startswith("settings that need less memory"))
    assert settings.count("--") == 3 and "--activations.checkpoint full" in settings, settings
    assert "--train.micro_batch 1" in settings, settings


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_of_a_gpu_without_memory_leaves_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A snapshot that cannot be written takes no other line away, and raises nothing."""

    def dump(path: str) -> None:
        if fails:
            raise RuntimeError("no snapshot")
        Path(path).write_bytes(b"segments")

    monkeypatch.setattr(out_of_memory, "dump_memory_history", dump)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 30)
    folder = RunFolder(tmp_path)
    world = SimpleNamespace(rank=1, size=2, device=torch.device("cuda"))
    model = torch.nn.Linear(2, 2)
    job: Any = SimpleNamespace(
        world=world,
        config=tiny(parallel={"engine": "ddp"}),
        position=SimpleNamespace(step=3),
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
    )
    out_of_memory.leave_owners(job, folder)
    lines = shortage_file(folder).read_text().splitlines()
    assert lines[0].startswith("memory of rank 1 by owner, after the error of step 4: ")
    assert lines[-1] == "to see each allocation: --train.memory_snapshot '[4]'"
    segments = folder.memory_segments(4, 1)
    assert segments.exists() == (not fails)
    said = f"snapshot of its GPU memory, blocks without stacks: {segments}; open it at pytorch.org/memory_viz"
    assert (said in lines) == (not fails)


def test_shares_of_runs_without_parts_are_empty() -> None:
    assert time_shares([{"seconds": 1.0}]) == {}


def test_a_run_that_has_lost_ranks_goes_on_without_their_traces() -> None:
    config = tiny(profile={"steps": [2, 3], "ranks": [0, 3]}, parallel={"engine": "shardwright"})
    with pytest.raises(UserError, match=r"profile\.ranks: expected ranks below 2"):
        check_division(config, 2)
    check_division(config, 2, resumes=True)
    check_division(config, 4)
