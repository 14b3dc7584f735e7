"""Ranks of one host under torchrun, until the watch begins: a rank that is stopped is found by the others, and ended.

torchrun sees only ranks that have ended. Without this the others wait for a stopped one for minutes. Once it is killed,
torchrun ends the rest or starts all again. Our launcher looks at the processes of its ranks itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from shardwright.train.config import Config
from shardwright.train.launch.environment import under_torchrun
from shardwright.train.launch.judgement import end_of_hang
from shardwright.train.launch.torchrun import agent_process
from shardwright.train.rank.hang_watch import KEY
from shardwright.train.run.exits import TRY_AGAIN, Outcome
from shardwright.watching import Diagnosis, Starting

EVERY = 1.0
"""Seconds between two looks."""
SECONDS_TO_END = 5.0
"""Seconds in which torchrun ends the ranks after it has seen that one was killed."""


def watch_start(
    rank: int, configured: Callable[[], Config], record: Callable[[Outcome], None], ended: threading.Event
) -> None:
    """Look at the ranks of this host, in a thread, until `ended` is set.

    `record` is called on the rank that ends a stopped one.
    """
    if under_torchrun():
        threading.Thread(
            target=_watch, args=(rank, configured, record, ended), daemon=True, name="start"
        ).start()


def _watch(
    rank: int, configured: Callable[[], Config], record: Callable[[Outcome], None], ended: threading.Event
) -> None:
    try:
        stall_seconds = configured().fault.stall_seconds
        agent, command = agent_process(), psutil.Process().cmdline()
    except Exception:
        return  # the main thread says so
    starting = Starting(stall_seconds, KEY)
    while stall_seconds and not ended.wait(EVERY):
        seen = starting.look(_ranks(agent, command))
        if (verdict := starting.judge(seen)) is not None and rank == starting.first_running(seen):
            _end(verdict, [each.pid for each in seen if each.rank in verdict.culprits], record)


def _end(verdict: Diagnosis, pids: list[int], record: Callable[[Outcome], None]) -> None:
    try:
        print(f"error: {verdict.text}", file=sys.stderr, flush=True)
        record(end_of_hang(verdict))
    finally:
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(SECONDS_TO_END)
        os._exit(TRY_AGAIN)


def _ranks(agent: psutil.Process, command: list[str]) -> dict[int, int]:
    """Return the process of each rank that this torchrun process has started. All have the same command line."""
    pids: dict[int, int] = {}
    for process in agent.children(recursive=True):  # a worker of a rank comes after the rank
        with suppress(psutil.Error, KeyError, ValueError):
            if process.cmdline() == command:
                pids.setdefault(int(process.environ()["RANK"]), process.pid)
    return pids
