"""The pool that runs multi-rank tests: gloo processes started once per session and number of ranks.

`multirank` turns a function into a test that runs on every rank; `WorkerPools` starts, feeds, watches and
ends the processes. A case that fails, hangs or kills a worker costs its pool, never its neighbours: the next
case gets fresh processes, forked from a server that has torch imported already. worker.py runs inside a rank.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support import worker
from tests.support.worker import Case, Reply, Seat, seed_all

with suppress(ModuleNotFoundError):  # `make gpu` imports this package also where only PyTorch is installed
    import pytest

__all__ = ["CaseFailed", "CaseSkipped", "WorkerPools", "forkserver", "multirank", "seed_all", "world_mesh"]

CASE_TIMEOUT = 60.0
"""Seconds a case may take unless it says otherwise."""
START_TIMEOUT = 120.0
"""Seconds a pool may take to start; the first one imports torch."""
GRACE = 5.0
"""Seconds the other ranks get once one has failed: they may wait for it in a collective for ever."""
STACK_PATIENCE = 3.0
"""Seconds to wait for a worker to write its stack."""
OUTPUT_TAIL = 8_000
"""Characters of a rank's output shown with a failure."""


def forkserver() -> ForkServerContext:
    """The context that starts processes in a fraction of a second: they are forked from one that has torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    return context


class CaseFailed(Exception):
    """A case failed on some rank. The text has every rank's traceback, stack or exit status, and output."""


class CaseSkipped(Exception):
    """Every rank that ran the case asked to skip it."""


@dataclass(frozen=True)
class _Worker:
    seat: Seat
    process: ForkServerProcess
    commands: connection.Connection
    lifeline: (
        connection.Connection
    )  # held open and never used: its end tells the worker that its parent is gone


class WorkerPool:
    """The processes of one world size. Good until the first case that does not pass; then start a new one."""

    def __init__(self, world_size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shardwright-pool-"))
        # Hosted here, on a port of the system's choosing: it outlives any worker and no two pools collide.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.workers: list[_Worker] = []
        try:
            for rank in range(world_size):
                self.workers.append(self._start(rank, world_size))
            replies = self._collect(START_TIMEOUT, GRACE)
            if len(replies) < world_size:
                raise CaseFailed(self._report(f"expected {world_size} workers to start", replies))
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, world_size: int) -> _Worker:
        files = self.folder / f"rank{rank}.output", self.folder / f"rank{rank}.stacks"
        seat = Seat(rank, world_size, self.store.port, *files)
        context = forkserver()
        ours, theirs = context.Pipe()
        their_lifeline, our_lifeline = context.Pipe(duplex=False)
        process = context.Process(target=worker.main, args=(seat, theirs, their_lifeline), name=f"rank{rank}")
        process.start()
        theirs.close()
        their_lifeline.close()
        return _Worker(seat, process, ours, our_lifeline)

    def run(self, case: Case, timeout: float, grace: float) -> list[Any]:
        """Run `case` on every rank and return the results by rank, or raise CaseFailed or CaseSkipped."""
        started = time.monotonic()
        message = pickle.dumps(case)
        for member in self.workers:
            try:
                member.commands.send_bytes(message)
            except OSError:  # the worker died between cases; waiting for its reply finds and reports that
                continue
        replies = self._collect(timeout, grace)
        if len(replies) == len(self.workers):
            outcomes = {reply.outcome for reply in replies.values()}
            if outcomes == {"passed"}:
                if apart := _apart(replies):
                    raise CaseFailed(f"{case.module}:{case.qualname} passed, and leaves ranks apart: {apart}")
                return [replies[rank].payload for rank in range(len(self.workers))]
            if outcomes == {"skipped"}:
                raise CaseSkipped(replies[0].payload)
        seconds = time.monotonic() - started
        raise CaseFailed(self._report(f"{case.module}:{case.qualname} failed after {seconds:.1f} s", replies))

    def _collect(self, timeout: float, grace: float) -> dict[int, Reply]:
        """Wait for every rank's reply; once one has failed or died, give the others only `grace` seconds."""
        deadline = time.monotonic() + timeout
        waiting = {member.commands: member for member in self.workers}
        replies: dict[int, Reply] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in connection.wait(list(waiting), timeout=left):
                assert isinstance(ready, connection.Connection)
                rank = waiting.pop(ready).seat.rank
                try:
                    replies[rank] = pickle.loads(ready.recv_bytes())
                except (EOFError, OSError):  # a dead worker's end of the pipe is closed
                    pass
                if rank not in replies or replies[rank].outcome == "failed":
                    deadline = min(deadline, time.monotonic() + grace)
        return replies

    def _report(self, headline: str, replies: dict[int, Reply]) -> str:
        """The outcome of each rank. Failures come first: they are the likely cause of the others' waits."""
        silent = [member for member in self.workers if member.seat.rank not in replies]
        stacks = _stacks_of(silent)
        failed = [rank for rank, reply in replies.items() if reply.outcome == "failed"]
        others = [rank for rank in replies if rank not in failed]
        sections = [headline]
        for rank in [*failed, *sorted(stacks), *others]:
            said = f"{replies[rank].outcome}\n{replies[rank].payload}" if rank in failed else stacks.get(rank)
            sections.append(f"=== rank {rank} of {len(self.workers)}: {said or replies[rank].outcome}")
            output = _tail(self.workers[rank].seat.output)
            if output:
                sections.append(f"--- output of rank {rank}\n{output}")
        return "\n".join(section.rstrip() for section in sections)

    def kill(self) -> None:
        """End every worker, whatever it is doing, and remove the pool's files."""
        for member in self.workers:
            member.process.kill()
        for member in self.workers:
            member.process.join()
            member.commands.close()
            member.lifeline.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _apart(replies: dict[int, Reply]) -> str:
    """The first group of which ranks have begun different numbers of collectives: the next case would fail."""
    for group in {group for reply in replies.values() for group in reply.begun}:
        name, ranks = group
        counts = [replies[rank].begun.get(group) for rank in ranks]
        if len(set(counts) - {None}) > 1:
            return f"of group {name} the ranks {ranks} have begun {counts} collectives"
    return ""


def _stacks_of(silent: list[_Worker]) -> dict[int, str]:
    """For each worker that gave no reply: how it died, or that it hangs; either way the stack it left."""
    living = [member for member in silent if not _has_died(member)]
    for member in living:
        assert member.process.pid is not None
        os.kill(member.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_PATIENCE
    while living and not all(_stack_is_written(member) for member in living) and time.monotonic() < deadline:
        time.sleep(0.02)
    texts = {}
    for member in silent:
        hangs = member in living
        state = "no reply in time; its stack:" if hangs else _cause_of_death(member.process.exitcode)
        stack = _without_noise(_read(member.seat.stacks))
        texts[member.seat.rank] = f"{state}\n{stack or '(it wrote no stack)'}"
    return texts


def _has_died(member: _Worker) -> bool:
    """A closed pipe precedes the exit status by a moment; a worker that is alive costs that moment once."""
    member.process.join(timeout=0.2)
    return member.process.exitcode is not None


def _stack_is_written(member: _Worker) -> bool:
    """The main thread comes last in a dump, so its bottom frame being there means that the dump is whole."""
    return re.search(r"support/worker\.py\", line \d+ in main\n", _read(member.seat.stacks)) is not None


def _without_noise(dump: str) -> str:
    """A dump of faulthandler without the worker's own watchdog thread and the frames that led to the case."""
    threads = [thread for thread in dump.split("\n\n") if "in _die_with_parent" not in thread]
    return "\n\n".join(re.split(r'\n.*support/worker\.py"', thread)[0] for thread in threads).strip()


def _cause_of_death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exited with status {exitcode}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _tail(path: Path) -> str:
    text = _read(path).rstrip()
    hidden = len(text) - OUTPUT_TAIL
    return text if hidden <= 0 else f"[{hidden} characters before this]\n{text[-OUTPUT_TAIL:]}"


class WorkerPools:
    """All pools of a session, by name and world size: started when first needed, replaced after a case that failed."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], WorkerPool] = {}
        atexit.register(
            self.close
        )  # runs before multiprocessing's own hook, which would wait for the workers

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *,
        timeout: float = CASE_TIMEOUT,
        grace: float = GRACE,
        pool_name: str = "",
        **arguments: Any,
    ) -> list[Any]:
        """Call `function(rank=, world_size=, **arguments)` on `world_size` ranks; return the results by rank.

        The function must be importable from its module; arguments and results must be picklable. Raises
        CaseFailed with a report of every rank when one raises, dies, or has not returned after `timeout`
        seconds, and CaseSkipped when all of them skip.
        """
        case = Case(function.__module__, function.__qualname__, list(sys.path), arguments)
        if (pool_name, world_size) not in self._pools:
            self._pools[pool_name, world_size] = WorkerPool(world_size)
        try:
            return self._pools[pool_name, world_size].run(case, timeout, grace)
        except (
            BaseException
        ):  # Ctrl-C too: after any of these, nobody knows what the ranks are in the middle of
            self._pools.pop((pool_name, world_size)).kill()
            raise

    def close(self) -> None:
        """End every process of every pool."""
        while self._pools:
            self._pools.popitem()[1].kill()


def run_case(
    pools: WorkerPools,
    body: Callable[..., Any],
    ranks: int,
    timeout: float,
    /,
    pool_name: str = "",
    **arguments: Any,
) -> None:
    """Run ``body`` on every rank; its failure or its skip is the test's."""
    try:
        pools.run(body, ranks, timeout=timeout, pool_name=pool_name, **arguments)
    except CaseSkipped as skipped:
        reason = str(skipped)
    except CaseFailed as failure:
        pytest.fail(str(failure), pytrace=False)
    else:
        return
    pytest.skip(reason)


def multirank(
    *world_sizes: int, timeout: float = CASE_TIMEOUT, pool_name: str = ""
) -> Callable[[Callable[..., Any]], Any]:
    """Make a test that runs on every rank of each of these world sizes.

        @multirank(2, 3)
        @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
        def test_sum(rank: int, world_size: int, dtype: torch.dtype) -> None:
            value = torch.full((4,), rank, dtype=dtype)
            torch.distributed.all_reduce(value)
            assert value[0] == sum(range(world_size))

    The body runs in worker processes with the default gloo group set up. Parameters and fixtures are sent to
    the ranks, so their values must be picklable (`tmp_path` is, and all of them get the same). A case
    that takes more than `timeout` seconds fails with every rank's stack. Tests with one ``pool_name`` share
    processes, which other tests do not use: for those that change a process for good.
    """
    if not world_sizes:
        raise TypeError("multirank expects at least one number of ranks, as in @multirank(2, 3), found none")

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def case(worker_pools: WorkerPools, world_size: int, **arguments: Any) -> None:
            run_case(worker_pools, body, world_size, timeout, pool_name=pool_name, **arguments)

        signature = inspect.signature(body)
        fixture = inspect.Parameter("worker_pools", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        asked = [parameter for name, parameter in signature.parameters.items() if name != "rank"]
        case.__signature__ = signature.replace(parameters=[fixture, *asked])  # type: ignore[attr-defined]
        case.multirank_body = body  # type: ignore[attr-defined]
        names = [f"{size}ranks" for size in world_sizes]
        return pytest.mark.multirank(pytest.mark.parametrize("world_size", world_sizes, ids=names)(case))

    return decorate


@functools.cache
def world_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The CPU mesh of this shape over all ranks, made once: sub-groups cost sockets and threads."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)
