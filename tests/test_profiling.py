"""`sw.profiler`: traces with the names of units, schedules, and failures that do not end training."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shardwright as sw
from shardwright.engine import heartbeat
from shardwright.watching import profiling
from tests.engine.kit.subclasses import backward
from tests.engine.kit.surface import build, shard
from tests.support import multirank

DOCS = Path(__file__).parents[1] / "docs" / "profiling.md"


def names_in(path: Path) -> list[str]:
    """The ranges of a trace that users and the engine have set."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


@multirank(2)
def test_every_gather_reduction_wait_and_prefetch_has_the_name_of_its_unit(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    model = shard("shardwright", build())
    backward(model, rank)
    with sw.profiler(model, tmp_path, ranks=None) as profiler:
        backward(model, rank)
    assert heartbeat.current is None
    assert profiler.files == [tmp_path / f"rank-{rank}.json.gz"]
    names = names_in(profiler.files[0])
    for unit in ("blocks.0", "blocks.1", "blocks.2"):
        gathers = [n for n in names if n.endswith(f"all-gather of {unit}") and not n.startswith("wait")]
        assert len(gathers) == 2 and names.count(f"wait: all-gather of {unit}") == 2, names
        assert names.count(f"reduce-scatter of {unit}") == 1
        assert names.count(f"wait: reduce-scatter of {unit}") == 1
    # The model itself, which has the head, comes first in forward and in backward: each block is gathered ahead.
    assert next(n for n in names if n.endswith("all-gather of Net")) == "all-gather of Net"
    assert names.count("prefetch: all-gather of blocks.1") == 2
    assert not any(name.endswith(" of ") for name in names)


@multirank(2)
def test_results_are_those_without_a_profiler(rank: int, world_size: int, tmp_path: Path) -> None:
    gradients = []
    for profiled in (False, True):
        model = shard("shardwright", build())
        with sw.profiler(model, tmp_path, ranks=(0, 1) if profiled else ()) as profiler:
            backward(model, rank)
        assert bool(profiler.files) == profiled
        gradients.append([p.grad.full_tensor() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@multirank(2)
def test_the_example_of_the_documentation_writes_a_trace_of_each_cycle(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    model = shard("shardwright", build())

    def train_step() -> None:
        backward(model, rank)

    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(block, {"model": model, "train_step": train_step, "sw": sw, "torch": torch})
    files = sorted(path.name for path in (tmp_path / "profile").iterdir()) if rank == 0 else []
    assert files == ([] if rank else ["rank-0-cycle-0.json.gz", "rank-0.json.gz"])
    if rank == 0:
        for file in files:
            assert "wait: all-gather of blocks.1" in names_in(tmp_path / "profile" / file)


@multirank(1)
@pytest.mark.parametrize("method", ["start", "step", "stop", "export_chrome_trace"])
def test_a_failure_of_the_profiler_does_not_end_training(
    rank: int, world_size: int, tmp_path: Path, method: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no room in the buffer")

    model = shard("shardwright", build())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, method, fail)
        with (
            pytest.warns(
                UserWarning,
                match="profiler of this rank has stopped, and training goes on: RuntimeError: no room in the",
            ),
            sw.profiler(model, tmp_path) as profiler,
        ):
            backward(model, rank)
            profiler.step()
    assert profiler.failure == "RuntimeError: no room in the buffer" and heartbeat.current is None
    if method in ("step", "stop"):
        profiler.torch.stop()


@multirank(1)
def test_an_error_of_the_loop_is_raised_and_the_trace_is_written(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    model = shard("shardwright", build())
    with pytest.raises(KeyError), sw.profiler(model, tmp_path) as profiler:
        backward(model, rank)
        raise KeyError
    assert len(profiler.files) == 1 and heartbeat.current is None


def test_what_is_no_sharded_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expects a model \(torch.nn.Module\), got int"):
        sw.profiler(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got a Linear without a sharded part"):
        sw.profiler(torch.nn.Linear(2, 2))


def test_ranges_of_a_thread_do_not_overlap() -> None:
    """An outer gather notes a begin without an end, and an issue that begins nothing notes an end alone."""
    names = profiling.UnitNames()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        names.leave()
        names.at(heartbeat.FORWARD, "a")
        names.enter("all-gather", "0-3", 8, "a")
        names.enter("all-gather", "0,2", 8, "a")
        names.leave()
        names.await_result("all-gather", "0,2", 8, "b")
        names.end_step()
        names.enter("all-reduce of the loss", "0-3", 8, "")
        names.leave()
        names.leave()
    ranges = sorted((e.time_range.start, e.time_range.end, e.name) for e in profiler.events())
    assert [name for _, _, name in ranges] == [
        "all-gather of a", "all-gather of a", "wait: all-gather of b", "all-reduce of the loss"
    ]  # fmt: skip
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


@multirank(1)
def test_a_second_profiler_of_torch_is_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    """It would end the process."""
    model = shard("shardwright", build())
    with (
        profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.warns(UserWarning, match="another profiler of torch records already"),
        sw.profiler(model, tmp_path),
    ):
        backward(model, rank)
    with pytest.raises(RuntimeError, match=r"expected `with sw\.profiler"):
        sw.profiler(model, tmp_path).step()
