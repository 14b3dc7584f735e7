"""gloo groups: one worker thread in tests and in the trainer, and programs that end them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.engine.compat.collectives import backend_for
from shardwright.train.parallel.world import join_world
from tests.support import multirank
from tests.train.kit.jobs import tiny

ROOT = Path(__file__).parents[3]
#: But examples/ports, which are as others write them: with a call at the end.
PROGRAMS = sorted(
    path
    for folder in ("examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if path.parent.name != "ports"
    if "init_process_group(" in (text := path.read_text()) or "init_device_mesh(device" in text
)


def threads_of(group: dist.ProcessGroup | None = None) -> int:
    return int(backend_for(group or dist.group.WORLD, torch.device("cpu")).options._threads)


@multirank(2)
def test_groups_of_tests_have_one_worker_thread(rank: int, world_size: int) -> None:
    assert threads_of() == threads_of(dist.new_group(backend="gloo")) == 1
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value.tolist() == [2, 2, 2]


def test_groups_of_the_trainer_have_one_worker_thread_and_end_with_failures() -> None:
    with pytest.raises(KeyError), join_world(tiny()):
        assert threads_of() == 1
        assert isinstance(backend_for(dist.group.WORLD, torch.device("cpu")), dist.ProcessGroupGloo)
        raise KeyError
    assert not dist.is_initialized()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_programs_destroy_their_groups_also_after_failures(program: Path) -> None:
    text = program.read_text()
    assert any(
        each in text for each in ("atexit.register(dist.destroy_process_group)", '"fake"', "os._exit(")
    )


EXITS = """
import atexit, time
import torch.distributed as dist
import torch
time.sleep = lambda seconds: print("rests", seconds)
from shardwright.engine.comm.meeting import Meeting
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
Meeting(dist.group.WORLD, torch.device("cpu"))
Meeting(dist.group.WORLD, torch.device("cpu"))
atexit.register(lambda: (dist.destroy_process_group(), print("destroyed")))
"""


@pytest.mark.extensive("a race, looked for in many programs")
def test_workers_come_to_rest_before_the_interpreter_ends() -> None:
    """One that still gives tensors back would abort the process, in some of many runs on a busy machine."""
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["destroyed", "rests 0.1"], done.stderr
