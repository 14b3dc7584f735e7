"""The marks of streams in the notes of a step: their order on the CPU, and the times of a device."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.engine import heartbeat
from shardwright.engine.comm import HostStreams, hears_dtensor, streams_for, use_streams, watched
from shardwright.engine.compat.dtensor import functional_collectives
from shardwright.train.extend import StepRecord
from shardwright.train.report.page.notes import notes_picture
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.account.clock import Event
from shardwright.train.step.account.step_notes import NOTED, NotesOfStep
from shardwright.train.step.trainer import Trainer
from tests.support import multirank, world_mesh
from tests.train.kit.jobs import tiny, train_step, trainer

CPU = torch.device("cpu")


@contextmanager
def noting(folder: Path, event: Any = None) -> Iterator[NotesOfStep]:
    """The notes of the work inside the context, which is a step."""
    job = cast(Trainer, SimpleNamespace(world=SimpleNamespace(device=CPU, rank=0), config=tiny()))
    notes = NotesOfStep(job, RunFolder(folder), event)
    for step in range(1, NOTED + 1):
        notes.before_step(step)
    yield notes
    notes.after_step(cast(StepRecord, SimpleNamespace(step=NOTED)))


def rows_of(folder: Path) -> tuple[dict[str, Any], list[tuple[str, str, int]]]:
    """The file, and of each mark of a stream its act, its unit and its time on the device."""
    content = json.loads((folder / "step_notes.json").read_text())
    names = content["names"]
    rows = [(names[name], names[unit], time) for _, kind, unit, name, time in content["notes"] if kind == 6]
    return content, rows


@multirank(2)
def test_marks_are_in_the_order_of_a_step_on_the_cpu(rank: int, world_size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        sw.fully_shard(module, mesh=world_mesh(2), reshard_after_forward=True)  # type: ignore[arg-type]
    folder = tmp_path / str(rank)
    folder.mkdir()
    for _ in range(2):  # the order of units is known then
        model(torch.ones(2, 4)).sum().backward()
    with noting(folder):
        model(torch.ones(2, 4)).sum().backward()
    assert vars(streams_for(CPU)) == {}  # the methods are the class's own again
    content, rows = rows_of(folder)
    assert {time for *_, time in rows} == {-1}
    gathers = [(act, unit) for act, unit, _ in rows if act in ("fork gather", "mark gather", "join gather")]
    first, second = [
        [("fork gather", unit), ("mark gather", unit)] for unit in ("0", "1")
    ]  # the second is gathered ahead
    forward = [*first, *second, ("join gather", "0"), ("join gather", "1")]
    assert gathers[: len(forward)] == forward, gathers
    reductions = [(act, unit) for act, unit, _ in rows if act.endswith("reduce")]
    assert reductions == [
        (f"{act} reduce", unit)
        for act, unit in (
            ("fork", "1"),
            ("mark", "1"),
            ("join", "1"),
            ("fork", "0"),
            ("mark", "0"),
            ("join", "0"),
        )
    ], reductions
    spans = {each["name"]: each for each in notes_picture(content)["streams"]}
    assert len(spans["reduce"]["kernels"]) == 2 and len(spans["gather"]["kernels"]) >= 2


class FakeEvent:
    """An event of a device whose time goes on by 2 ms with each event."""

    clock = itertools.count(0, 2)

    def __init__(self) -> None:
        self.at, self.stream = -1, None

    def record(self, stream: Any = None) -> None:
        self.at, self.stream = next(self.clock), stream

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, later: Event) -> float:
        return float(cast(FakeEvent, later).at - self.at)


class FakeDevice(HostStreams):
    """Streams of a device whose marks are objects."""

    asynchronous = False

    def side(self, name: str) -> Any:
        return name

    def current(self) -> Any:
        return "compute"

    def mark(self, name: str) -> Any:
        return object()


def test_marks_have_the_times_of_a_device(tmp_path: Path) -> None:
    streams = FakeDevice()
    FakeEvent.clock = itertools.count(0, 2)
    with use_streams(CPU, streams), noting(tmp_path, FakeEvent):
        with streams.fork("gather"):
            pass
        first = streams.mark("gather")
        with streams.beside("reduce", first):
            second = streams.mark("reduce")
        streams.join(first)
        streams.join(None)  # orders nothing
        streams.host_wait(second)
        streams.rejoin()
    content, rows = rows_of(tmp_path)
    assert [(act, time) for act, _, time in rows] == [
        ("fork gather", 2000), ("mark gather", 4000), ("beside reduce", 6000), ("mark reduce", 8000),
        ("join gather", 10000), ("host wait reduce", -1), ("rejoin", 12000),
    ]  # fmt: skip
    picture = notes_picture(content)
    spans = {each["name"]: (each["gaps"], each["lengths"]) for each in picture["streams"]}
    assert spans["gather"] == ([2000], [2000]) and spans["reduce"] == ([6000], [2000])
    assert picture["length"] > 12000


def test_streams_that_fail_are_restored() -> None:
    streams = FakeDevice()
    with pytest.raises(KeyError), watched(streams, lambda what, name, stream: None):
        raise KeyError
    assert vars(streams) == {}


@multirank(2)
def test_collectives_of_tensor_parallelism_are_noted(rank: int, world_size: int, tmp_path: Path) -> None:
    parallel = {"engine": "shardwright", "tensor": 2}
    train = {"micro_batch": 1, "global_batch": 2}
    job = trainer(tiny(model={"n_kv_heads": 2}, parallel=parallel, train=train), rank, world_size)
    clock = job.clock
    folder = RunFolder(tmp_path / str(rank))
    folder.path.mkdir()
    notes = NotesOfStep(job, folder)
    parts = []
    for step in range(1, NOTED + 1):
        with heartbeat.listening(clock), hears_dtensor(clock) if step > 1 else nullcontext():
            clock.begin()
            notes.before_step(step)
            train_step(job)
            parts.append(clock.end()[1])
            notes.after_step(cast(StepRecord, SimpleNamespace(step=step)))
    job.close()
    assert isinstance(functional_collectives.all_reduce, torch._ops.OpOverloadPacket)
    content = json.loads(folder.notes_file.read_text())
    kinds, names = content["kinds"], content["names"]
    seen = {(kinds[kind], names[name]) for _, kind, _, name, _ in content["notes"]}
    assert {("begin", "DTensor all-gather"), ("begin", "DTensor reduce-scatter")} <= seen
    assert ("wait", "DTensor collective") in seen
    units = {names[unit] for _, _, unit, name, _ in content["notes"] if names[name] == "DTensor all-gather"}
    assert {"layers.0", "layers.1"} <= units
    sizes = [nbytes for *_, name, nbytes in content["notes"] if names[name] == "DTensor all-gather"]
    assert min(sizes) > 0
    assert all(part["communication"] > 0 for part in parts)
