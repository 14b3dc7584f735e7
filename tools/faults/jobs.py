"""One attempt of a job: ranks forked from this process, which has imported torch, and watched to their end.

The ranks find what torchrun gives them: variables, a store that outlives them, and an agent above them.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch.distributed as dist

from shardwright import cli
from tools.faults.history import History
from tools.faults.planting import plant
from tools.faults.points import Fault, Plan, is_writer

GRACE_SECONDS = 15.0
"""From the first rank that failed to the killing of the others: a rank that takes longer waits without end."""
LONGEST_SECONDS = 90.0
"""The limit of an attempt. One that takes longer hangs."""
LONGEST_REFERENCE = 600.0
"""The limit of an attempt that nobody disturbs, on a machine that has other work."""
ALONE_SECONDS = 20.0
"""The limit of an attempt in which the only rank stops: nobody waits for it."""


@dataclass(frozen=True)
class Job:
    """The command of a job and where its ranks write."""

    config: Path
    folder: Path
    log: Path


@contextlib.contextmanager
def store() -> Iterator[int]:
    """The port of a store in a process of its own, so that this process stays without threads and can fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, f"{server.port}\n".encode())
        while True:
            signal.pause()
    try:
        os.close(writer)
        with open(reader) as stream:
            yield int(stream.readline())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def run_attempt(
    job: Job, ranks: int, fault: Fault | None, history: History, port: int, longest: float = LONGEST_SECONDS
) -> bool:
    """Run an attempt to its end and write to the history how it ended. Whether every rank was done."""
    began = time.monotonic()
    history.add("attempt", ranks=ranks, **({} if fault is None else {"planned": vars(fault)}))
    running: dict[int, int] = {}
    for rank in range(ranks):
        running[_forked(job, rank, ranks, fault, history, port, next(iter(running), 0))] = rank
    statuses: dict[int, int] = {}
    deadline = began + (ALONE_SECONDS if ranks == 1 and stalls(fault) else longest)
    try:
        killed = _watch(running, statuses, deadline)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    history.add(
        "ended",
        statuses=[statuses[rank] for rank in range(ranks)],
        killed=killed,
        seconds=time.monotonic() - began,
        orphans=_orphans(job),
    )
    return not any(statuses.values())


def _watch(running: dict[int, int], statuses: dict[int, int], deadline: float) -> list[int]:
    """Wait until no process in ``running`` (ranks by process) is left; returns the ranks that had to be killed.

    A rank that ends leaves ``running``, and ``statuses`` gets its status. ``deadline`` is a time of ``monotonic``.
    """
    processes = {pid: psutil.Process(pid) for pid in running}
    killed: list[int] = []
    while running:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                if code != 0 and not statuses.keys() - _done(statuses):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                statuses[running.pop(pid)] = code
        if time.monotonic() > deadline:
            deadline = math.inf
            killed += [rank for pid, rank in running.items() if _answers(processes[pid])]
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return killed


def stalls(fault: Fault | None) -> bool:
    """Whether the fault leaves a rank that neither works nor ends."""
    return fault is not None and fault.kind in ("stop", "gil")


def _done(statuses: dict[int, int]) -> set[int]:
    return {rank for rank, status in statuses.items() if status == 0}


def _answers(process: psutil.Process) -> bool:
    """Whether it is not stopped: a stopped rank cannot end by itself."""
    try:
        return bool(process.status() != psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _forked(
    job: Job, rank: int, ranks: int, fault: Fault | None, history: History, port: int, group: int
) -> int:
    child = os.fork()
    if child:
        os.setpgid(child, group or child)  # in both processes, whichever is first
        return child
    status = 70
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, group)
        _rank(job, rank, ranks, fault, history, port)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _rank(job: Job, rank: int, ranks: int, fault: Fault | None, history: History, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="faults", SHARDWRIGHT_TIMEOUT=str(LONGEST_SECONDS),
        FAULTS_FOLDER=str(job.folder),
    )  # fmt: skip
    output = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    plant(Plan(fault, own := History(history.path, history.place, rank)), fault)
    status = cli.main(["train", str(job.config), "--run.dir", str(job.folder), "--debug"])
    own.add("done", status=status)
    sys.exit(status)


def _orphans(job: Job) -> int:
    """Writer processes that live on 5 seconds after their trainers."""
    deadline = time.monotonic() + 5.0
    while (found := _writers(job)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in found:
        process.kill()
    return len(found)


def _writers(job: Job) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if is_writer(process.info["cmdline"]) and process.environ().get("FAULTS_FOLDER") == str(
                job.folder
            ):
                found.append(process)
    return found
