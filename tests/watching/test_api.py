"""``sw.watch`` in a program: what it refuses, that it leaves nothing behind, and that the example of its page runs."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.engine import heartbeat
from shardwright.watching import diagnosis, evidence
from tests.support import multirank, world_mesh

PAGE = Path(__file__).parents[2] / "docs" / "hangs.md"


def sharded(ranks: int) -> nn.Module:
    return sw.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=world_mesh(ranks))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@multirank(2)
def test_wrong_use_is_refused(rank: int, world_size: int) -> None:
    model = sharded(2)
    with pytest.raises(TypeError, match="expects a model"):
        sw.watch("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Call it after fully_shard"):
        sw.watch(nn.Linear(2, 2))
    for seconds in (0, -1, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match="positive number of seconds"):
            sw.watch(model, seconds)
    for wrong in ("10", None):
        with pytest.raises(TypeError, match=f"stall_seconds must be a number of seconds, got {wrong!r}"):
            sw.watch(model, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="folder must be a path, got 3"):
        sw.watch(model, folder=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_stall must be a function that takes a text, got 3"):
        sw.watch(model, on_stall=3)  # type: ignore[arg-type]
    for folder in (__file__, Path(__file__) / "inside"):
        # On one rank alone, as where hosts have other disks: the others must not wait for it.
        with pytest.raises(OSError, match=rf"rank 1: folder: expected .*: {__file__} is no folder"):
            sw.watch(model, folder=folder if rank else None)
    with sw.watch(model), pytest.raises(RuntimeError, match="watches already"):
        sw.watch(model)
    assert heartbeat.current is None


def test_a_process_without_a_group_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.__class__ = type("Sharded", (nn.Linear, sw.FSDPModule), {})
    with pytest.raises(RuntimeError, match="init_process_group"):
        sw.watch(model)


@multirank(2)
def test_a_closed_watch_leaves_nothing(rank: int, world_size: int) -> None:
    model = sharded(2)
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        with sw.watch(model):
            step(model, optimizer)
            assert heartbeat.heartbeat_of(os.getpid()).exists()
        assert not [*heartbeat.folder_of_heartbeats().glob(f"{heartbeat.heartbeat_of(os.getpid()).name}*")]
        assert not [each for each in threading.enumerate() if each.name == "shardwright-watch"]
    step(model, optimizer)


@pytest.mark.extensive("it waits for a timeout")
@multirank(2)
def test_on_stall_gets_the_message_and_the_job_goes_on(rank: int, world_size: int, tmp_path: Path) -> None:
    model = sharded(2)
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    messages: list[str] = []
    with sw.watch(model, 3.0, tmp_path / "hangs", on_stall=messages.append):
        for _ in range(heartbeat.FIRST_STEPS + 1):
            step(model, optimizer)
        if rank == 1:
            deadline = time.monotonic() + 30
            while not messages and time.monotonic() < deadline:
                time.sleep(0.05)
        step(model, optimizer)
        # A busy machine may stall a rank once more.
        assert any("rank 1 is behind the others" in each for each in messages), messages
        assert any("rank 1: outside the model since" in each for each in messages), messages
    assert [*tmp_path.glob("hangs/*/diagnosis.txt")]


@multirank(2)
def test_ranks_agree_on_one_folder_that_other_jobs_do_not_use(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    model, jobs = sharded(2), []
    for _ in range(2):  # in one second
        with sw.watch(model, folder=tmp_path / "hangs") as watch:
            names: list[str | None] = [None, None]
            dist.all_gather_object(names, watch._watcher._job)
            assert names[0] == names[1]
            jobs.append(evidence.folder_name(watch._watcher._job))
    assert len(set(jobs)) == 2
    assert not (tmp_path / "hangs").exists()


@multirank(2)
def test_example_of_the_page_runs(rank: int, world_size: int) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    eval(example, {"sw": sw, "model": sharded(2)}).close()


def test_page_explains_each_headline() -> None:
    text = PAGE.read_text()
    for kind in (diagnosis.BEHIND, diagnosis.OUTSIDE, diagnosis.ALONE, diagnosis.JOINED, diagnosis.MIXED):
        rank = 0 if kind == diagnosis.ALONE else 2
        headline = diagnosis.Diagnosis(kind, (rank,), "", "", lost=False, step=4).headline
        assert f"`{headline.removeprefix('the job hangs in step 4: ')}`" in text
