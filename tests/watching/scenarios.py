"""Jobs that hang, each in its own way: processes are forked from this one, which has imported torch once.

``python -m tests.watching.scenarios FOLDER NAME...`` runs them, some at the same time, and writes results.json.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright import (  # noqa: F401  # before processes are forked
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from shardwright.watching import WatchSettings, api

STALL = 3.0
RANKS, CULPRIT, STEP = 2, 1, 4
AT_ONCE = 8
LIMIT = 20.0  #: seconds from the fault to the end of all ranks
TO_START = 90.0  #: seconds to the fault


class Block(nn.Module):
    """Two layers. ``between`` sees what the first one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between: Callable[[torch.Tensor], None] = lambda value: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.first(x)
        self.between(value)
        return self.second(value)


class Net(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# -- what happens ------------------------------------------------------------------------------------------------------


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hold_interpreter() -> None:
    """Lock a mutex twice. Unlike a sleep, no signal ends this."""
    library, mutex = ctypes.PyDLL(None), (ctypes.c_char * 64)()
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def loop() -> None:
    while True:
        time.sleep(0)


def sleep() -> None:
    time.sleep(600)


def be_slow() -> None:
    time.sleep(1.5 * STALL)


def broadcast_from_the_other() -> None:
    dist.broadcast(torch.zeros(1), src=1 - dist.get_rank())


def wait_for_nobody() -> None:
    """A collective of a group that the others do not call."""
    dist.barrier(_pair())


def wait_for_all() -> None:
    dist.barrier()


_groups: list[Any] = []


def _pair() -> Any:
    return _groups[0]


@dataclass(frozen=True)
class Scenario:
    """The act of the culprit, and its place. ``text``: some rank of each host says it."""

    where: str
    what: Callable[[], None]
    text: str
    ranks: int = RANKS
    culprit: int = CULPRIT
    hosts: int = 1  #: that the ranks believe to be on
    step: int = STEP
    by_all: bool = False  #: every rank does it
    ends_well: bool = False


SCENARIOS = {
    "stopped in forward": Scenario("forward", stop, "rank 1: forward of layers.1 since * s, process stopped (T)"),
    "stopped in backward": Scenario(
        "backward", stop, "rank 1: backward of layers.1 since * s, process stopped (T)", ranks=3
    ),
    "stopped in the optimizer": Scenario("optimizer", stop, "rank 1: optimizer since * s, step 4, process stopped (T)"),
    "stopped in a save": Scenario("save", stop, "rank 1: save since * s, process stopped (T)"),
    "stopped between steps": Scenario("data", stop, "rank 1: outside the model since * s, process stopped (T)"),
    "interpreter held": Scenario(
        "forward", hold_interpreter, "rank 1: forward of layers.1 since * s, no thread of it runs"
    ),
    "interpreter of the first rank held": Scenario(
        "backward", hold_interpreter, "rank 0: backward of layers.1 since * s, no thread of it runs", culprit=0
    ),
    "first rank stopped": Scenario(
        "forward", stop, "rank 0: forward of layers.1 since * s, process stopped (T)", ranks=3, culprit=0
    ),
    "endless loop": Scenario("backward", loop, "rank 1: backward of layers.1 since * s\n"),
    "sleep in a hook": Scenario("forward", sleep, "rank 1: forward of layers.1 since * s\n"),
    "stalled data": Scenario("data", sleep, "rank 1: outside the model since * s\n"),
    "left the loop": Scenario("leave", sleep, "rank 1: outside the model since * s\n"),
    "mismatched groups": Scenario("data", wait_for_nobody, "rank 1 waits in barrier", ranks=3),
    "a barrier of one rank": Scenario("leave", wait_for_all, "rank 1 waits in barrier"),
    "stuck at the end": Scenario("end", sleep, "rank 1: outside the model since * s\n"),
    "all joined": Scenario(
        "data", broadcast_from_the_other,
        "all ranks have joined a collective, and it does not end\n  ranks 0, 1 wait in broadcast", by_all=True,
    ),
    "sleep on another host": Scenario(
        "forward", sleep, "rank 3: forward of layers.1 since * s\n  ranks 0, 1, 2 wait in", ranks=4, culprit=3, hosts=2
    ),
    "a host that is gone": Scenario("forward", stop, f"rank 1: host {socket.gethostname()} does not answer", hosts=2),
    "slow compilation": Scenario("forward", be_slow, "", step=1, ends_well=True),
}  # fmt: skip


# -- a rank ------------------------------------------------------------------------------------------------------------


def run_rank(rank: int, scenario: Scenario, folder: Path, port: int) -> None:
    output = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=scenario.ranks)
    _groups[:] = [dist.new_group([0, 1])]
    torch.manual_seed(0)
    model = Net()
    mesh = dist.init_device_mesh("cpu", (scenario.ranks,))
    for layer in model.layers:
        sw.fully_shard(layer, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if scenario.hosts == 1:
        sw.watch(model, stall_seconds=STALL, folder=folder / "evidence")
    else:
        host = str(rank * scenario.hosts // scenario.ranks)
        api.start(WatchSettings(STALL, folder / "evidence"), host)
    at = Place(scenario.by_all or rank == scenario.culprit, scenario, folder)
    model.layers[1].between = lambda value: between(value, at)
    optimizer.register_step_pre_hook(lambda *_: at("optimizer"))
    for step in range(1, STEP + 2):
        at.step = step
        at("data")
        if at.is_here("leave"):
            break
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scenario.where == "save":
            save(model, optimizer, folder / f"step-{step}", at)
    at("leave")
    at("end")
    dist.barrier()
    dist.destroy_process_group()


def between(value: torch.Tensor, at: Place) -> None:
    at("forward")
    if value.requires_grad:
        value.register_hook(lambda _: at("backward"))


def save(model: nn.Module, optimizer: Any, folder: Path, at: Place) -> None:
    fsync = os.fsync

    def synchronise(number: Any) -> None:
        at("save")
        fsync(number)

    os.fsync = synchronise
    sw.save_checkpoint(folder, model, optimizer)
    os.fsync = fsync


@dataclass
class Place:
    """Where a rank is; here the culprit does what the scenario says."""

    is_culprit: bool
    scenario: Scenario
    folder: Path
    step: int = 0
    done: bool = False

    def is_here(self, where: str) -> bool:
        return self.is_culprit and where == self.scenario.where and self.step >= self.scenario.step

    def __call__(self, where: str) -> None:
        if self.is_here(where) and not self.done:
            self.done = True
            own = self.folder / f"beginning-{os.getpid()}"
            own.write_text(str(time.monotonic()))
            own.rename(self.folder / "begun")
            self.scenario.what()


# -- all scenarios -----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A scenario that runs, and what came of it: seconds from the fault to the end of each rank, and statuses."""

    name: str
    folder: Path
    pids: dict[int, int]
    began: float
    store: int  #: the process of the store, which outlives every rank
    ended: dict[int, float] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)

    def poll(self) -> bool:
        for rank, pid in self.pids.items():
            if rank in self.statuses:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.statuses[rank] = os.waitstatus_to_exitcode(status)
                self.ended[rank] = time.monotonic()
            elif time.monotonic() > self._deadline() or self._only_host(rank):
                os.kill(pid, signal.SIGKILL)
        return len(self.statuses) == len(self.pids)

    def _only_host(self, rank: int) -> bool:
        """Whether nobody on the host of this rank, the culprit, could end it, and the others have ended."""
        scenario = SCENARIOS[self.name]
        return scenario.hosts == scenario.ranks and {*self.pids} - {*self.statuses} == {rank} == {
            scenario.culprit
        }

    def _deadline(self) -> float:
        begun = self.folder / "begun"
        return float(begun.read_text()) + LIMIT if begun.exists() else self.began + TO_START

    def result(self) -> dict[str, Any]:
        file = self.folder / "begun"
        begun = float(file.read_text()) if file.exists() else self.began
        evidence = sorted(path.name for path in self.folder.glob("evidence/*/*"))
        stacks = "".join(path.read_text() for path in self.folder.glob("evidence/*/*.stacks.txt"))
        return {
            "seconds": {rank: ended - begun for rank, ended in self.ended.items()},
            "statuses": self.statuses,
            "texts": {rank: (self.folder / f"rank-{rank}.txt").read_text() for rank in self.pids},
            "evidence": evidence,
            "folders": [path.name for path in self.folder.glob("evidence/*")],
            "stacks": stacks,
            "left": [
                pid
                for pid in self.pids.values()
                if list(Path("/dev/shm").glob(f"shardwright-heartbeat-*-{pid}*"))
            ],
        }


def begin_store(folder: Path) -> tuple[int, int]:
    """A process with a store, and its port. A store has threads, and a process with threads must not fork ranks."""
    process = os.fork()
    if not process:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.partial").write_text(str(store.port))
        (folder / "port.partial").rename(folder / "port")
        while os.getppid() != 1:
            time.sleep(1.0)
        os._exit(0)
    deadline = time.monotonic() + 120
    while not (folder / "port").exists():
        assert time.monotonic() < deadline, "the process has no port"
        time.sleep(0.01)
    return process, int((folder / "port").read_text())


def begin(name: str, folder: Path) -> Run:
    scenario = SCENARIOS[name]
    folder.mkdir(parents=True)
    store, port = begin_store(folder)
    pids = {}
    for rank in range(scenario.ranks):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run_rank(rank, scenario, folder, port)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                atexit._run_exitfuncs()  # as at the end of any program: a watch that has a verdict ends the process
                os._exit(status)
        pids[rank] = pid
    return Run(name, folder, pids, time.monotonic(), store)


def main(folder: Path, names: list[str]) -> None:
    left, running, results = list(names), [], {}
    while left or running:
        while left and len(running) < AT_ONCE:
            running.append(begin(left[0], folder / left.pop(0).replace(" ", "-")))
        for each in [each for each in running if each.poll()]:
            running.remove(each)
            os.kill(each.store, signal.SIGKILL)
            os.waitpid(each.store, 0)
            results[each.name] = each.result()
        time.sleep(0.02)
    (folder / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(SCENARIOS))
