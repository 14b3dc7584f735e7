"""Collectives over bytes, division, and the order that streams and events give."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.engine.comm import Communicator, DeviceStreams, Division, plan_division
from tests.support import multirank
from tests.support.stand_in import stand_in_device

pytestmark = pytest.mark.central("ranks in the middle, and parts that differ in size")


def communicator() -> Communicator:
    return Communicator(dist.group.WORLD, torch.device("cpu"))


@multirank(1, 2, 3, 4)
def test_gather_fills_every_segment_rank_by_rank(rank: int, world_size: int) -> None:
    sizes = (5, 1, 16)
    inputs = [torch.full((n,), 10 * rank + i, dtype=torch.uint8) for i, n in enumerate(sizes)]
    outputs = [torch.zeros(n * world_size, dtype=torch.uint8) for n in sizes]
    done = []
    pending = communicator().all_gather(outputs, inputs, on_done=lambda: done.append(True))
    assert not done
    pending.wait()
    assert done == [True]
    for i, (n, output) in enumerate(zip(sizes, outputs, strict=True)):
        assert output.view(world_size, n).tolist() == [[10 * r + i] * n for r in range(world_size)]


@multirank(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [None, 1.0, 3.0])
@pytest.mark.parametrize("gloo", [True, False])
@pytest.mark.parametrize("widths", [(6,), (4, 2)])
def test_reduction_divides_once(
    rank: int, world_size: int, dtype: torch.dtype, factor: float | None, gloo: bool, widths: tuple[int, ...]
) -> None:
    comm = communicator()
    comm._gloo = gloo  # the path of other backends runs on gloo too
    row = torch.arange(world_size * 6, dtype=torch.float32).view(world_size, 6)
    output = torch.empty(6, dtype=dtype)
    inputs = [part.flatten().to(dtype) for part in (row * (rank + 1)).split(widths, dim=1)]
    comm.reduce_scatter(list(output.split(widths)), inputs, plan_division(dtype, world_size, factor)).wait()
    expected = row[rank] * sum(range(1, world_size + 1)) / (factor or world_size)
    torch.testing.assert_close(
        output.float(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-6
    )


@multirank(2)
def test_gloo_is_recognised_however_the_group_was_made(rank: int, world_size: int) -> None:
    for backend in (None, "gloo", "cpu:gloo"):
        group = dist.new_group(backend=backend)
        assert Communicator(group, torch.device("cpu"))._gloo, backend


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize("factor", [None, 1.0, 7.0])
def test_division_is_planned_once_in_all(world_size: int, factor: float | None) -> None:
    wanted = factor or world_size
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        division = plan_division(dtype, world_size, factor)
        by = (world_size if division.average else 1) * division.before * division.after
        assert by == pytest.approx(wanted)
        if (
            dtype == torch.float16
        ):  # before and after, so that neither the sum nor the quotient leaves the range
            assert not division.average and division.before**2 < 4 * max(wanted, 1)


def test_the_default_average_is_left_to_the_collective() -> None:
    assert plan_division(torch.float32, 8, None) == Division(average=True)


class FakeDevice:
    """The part of ``torch.cuda`` that the streams use, recording what is ordered after what."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stack = ["compute"]

    def current_stream(self, device: Any = None) -> FakeStream:
        return FakeStream(self, self.stack[-1])

    def Stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        return FakeStream(self, f"side{sum('made' in line for line in self.log)}", made=True)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.stack.append(stream.name)
        yield
        self.stack.pop()


class FakeStream:
    def __init__(self, api: FakeDevice, name: str, made: bool = False) -> None:
        self.api, self.name = api, name
        self.stream_id = id(self)
        if made:
            api.log.append(f"made {name}")

    def wait_stream(self, other: FakeStream) -> None:
        self.api.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.api.log.append(f"event on {self.name}")
        return f"event on {self.name}"

    def wait_event(self, event: str) -> None:
        self.api.log.append(f"{self.name} waits for {event}")


def test_side_streams_follow_the_computation_and_are_joined_by_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: api)
    streams = DeviceStreams(torch.device("cuda", 0))
    assert api.log == [f"made side{i}" for i in range(5)]
    api.log.clear()
    with streams.fork("gather"):
        api.log.append(f"gather on {api.stack[-1]}")
    mark = streams.mark("gather")
    streams.join(mark)
    assert api.log == [
        "side0 waits for compute",
        "gather on side0",
        "event on side0",
        "compute waits for event on side0",
    ]
    api.log.clear()
    with streams.beside("reduce"):
        api.log.append(f"on {api.stack[-1]}")
    assert api.log == ["on side1"]


@multirank(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gloo_over_the_memory_of_an_accelerator(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """gloo queues nothing on a stream, so all is there when the call returns, and ``on_done`` still waits."""
    with stand_in_device():
        comm = Communicator(dist.group.WORLD, torch.device("cpu"))
        gathered, done = torch.zeros(3 * world_size, dtype=torch.uint8), []
        mine = torch.full((3,), rank + 1, dtype=torch.uint8)
        gather = comm.all_gather([gathered], [mine], on_done=lambda: done.append(True))
        assert gathered.view(world_size, 3)[:, 0].tolist() == list(range(1, world_size + 1)) and not done
        gather.wait()
        assert done
        division = plan_division(dtype, world_size, None)
        pieces = torch.arange(world_size, dtype=dtype).repeat_interleave(2) + rank
        mean = torch.empty(2, dtype=dtype)
        comm.reduce_scatter([mean], [pieces.clone()], division)
        expected = rank + (world_size - 1) / 2
        assert mean.tolist() == pytest.approx([expected] * 2, rel=1e-3)
        both = torch.full((2,), float(rank), dtype=dtype)
        comm.all_reduce(both, division)
        assert both.tolist() == pytest.approx([(world_size - 1) / 2] * 2, rel=1e-3)


def test_a_collective_that_runs_at_the_end_of_the_interpreter_is_left_alone() -> None:
    """The driver of a device may have ended before it, so that a call of it would raise."""
    program = """
from shardwright.engine.comm.collectives import Pending

class Ended:
    def join(self, mark):
        raise RuntimeError("driver shutting down")

pending = Pending(Ended(), None, None, keep=object())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "driver shutting down" not in ended.stderr
