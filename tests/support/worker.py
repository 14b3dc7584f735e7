"""One rank of the pool: it joins the process group once, then runs one test after another.

The loop never issues a collective of its own, so it can never be mistaken for one of the test's: ranks meet
between cases only because the parent waits for every reply. It must not import the package under test.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib
import io
import os
import pickle
import random
import reprlib
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tests.support.gloo import share_one_gloo_device, use_one_gloo_thread

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=5)
"""Longer than a case may take: a stuck collective is the pool's to find, as only that shows every stack."""


@dataclass(frozen=True)
class Seat:
    """Where a worker sits: its rank, the store it meets the others at, and the files its parent reads."""

    rank: int
    world_size: int
    store_port: int
    output: Path
    stacks: Path


@dataclass(frozen=True)
class Case:
    """A test function by reference, with the arguments every rank gets."""

    module: str
    qualname: str
    import_path: list[str]
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """The outcome of one case on one rank. `payload` is a result, a traceback or a reason to skip."""

    outcome: str  # "passed", "failed" or "skipped"
    payload: Any = None
    begun: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    """How many collectives of shared memory each group has begun on this rank so far, by the group's name and ranks."""


def main(seat: Seat, commands: Connection, lifeline: Connection) -> None:
    """Entry point of a worker process: serve cases from `commands` until it is closed."""
    _redirect_output(seat.output)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends the workers
    stacks = open(seat.stacks, "w")  # noqa: SIM115 - faulthandler needs it until the process ends
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    _join_process_group(seat)
    commands.send_bytes(pickle.dumps(Reply("passed", "ready")))
    while True:
        try:
            case: Case = pickle.loads(commands.recv_bytes())
        except EOFError:
            return
        known = len(sys.modules)
        reply = _run_case(case, seat)
        gc.collect()
        reply = replace(reply, begun=_begun())
        if len(sys.modules) != known:
            gc.freeze()  # what an import leaves behind stays: scanning it after every case would cost 20 ms
        commands.send_bytes(_pickled(reply))


def _redirect_output(path: Path) -> None:
    """Send both streams to a file of this rank; append mode, so that truncating it starts anew."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    # The inherited streams may be block-buffered; a killed process would take their content with it.
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True, write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True, write_through=True)


def _die_with_parent(lifeline: Connection) -> None:
    """Exit when the parent is gone: nothing is ever sent, so the read returns only at end of file."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        pass
    os._exit(1)


def _join_process_group(seat: Seat) -> None:
    torch.set_num_threads(1)
    share_one_gloo_device()
    use_one_gloo_thread()
    store = dist.TCPStore("127.0.0.1", seat.store_port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    dist.init_process_group(
        "gloo", store=store, rank=seat.rank, world_size=seat.world_size, timeout=COLLECTIVE_TIMEOUT
    )


def _run_case(case: Case, seat: Seat) -> Reply:
    """Run one case and clean up behind it. Every exception becomes a reply, `SystemExit` included."""
    os.ftruncate(1, 0)
    try:
        body = _resolve(case)
        with _contained():
            seed_all(0)
            result = body(rank=seat.rank, world_size=seat.world_size, **case.arguments)
        reply = Reply("passed", result)
    except BaseException as error:
        if type(error).__name__ == "Skipped":  # pytest's own, without importing pytest to know it
            reply = Reply("skipped", str(error))
        else:
            reply = Reply("failed", _describe(error, case.module))
    sys.stdout.flush()
    sys.stderr.flush()
    return reply


def _begun() -> dict[tuple[str, tuple[int, ...]], int]:
    """The collectives that have begun in the package under test, if a case has imported it."""
    meetings = getattr(sys.modules.get("shardwright.engine.comm.meeting"), "_meetings", {})
    counts = {}
    for group, by_device in list(meetings.items()):
        ranks = tuple(dist.get_process_group_ranks(group))
        for meeting in by_device.values():
            if (copies := meeting._way.shared_memory) is not None:
                counts[group.group_name, ranks] = copies.posts.mine.last
    return counts


def _resolve(case: Case) -> Callable[..., Any]:
    """Import the test function, and look through the `multirank` wrapper if there is one."""
    sys.path[:] = case.import_path
    target: Any = importlib.import_module(case.module)
    for name in case.qualname.split("."):
        target = getattr(target, name)
    return getattr(target, "multirank_body", target)


@contextmanager
def _contained() -> Iterator[None]:
    """Undo what a case may change: torch's defaults, warnings, the environment, the working directory."""
    environment, folder = dict(os.environ), Path.cwd()
    with warnings.catch_warnings(), torch.enable_grad():
        try:
            yield
        finally:
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
            if torch.are_deterministic_algorithms_enabled():  # asked first: the setter imports the compiler
                torch.use_deterministic_algorithms(False)
            torch.set_num_threads(1)


def seed_all(rank: int) -> None:
    """Seed Python's and torch's generators from `rank`; give every rank its own to have different data."""
    random.seed(rank)
    torch.manual_seed(rank)


def _describe(error: BaseException, module: str) -> str:
    """The traceback from the test function on, with the local variables of the last frame in its module."""
    trace = (
        error.__traceback__.tb_next if error.__traceback__ else None
    )  # the first frame is the worker's own
    text = "".join(traceback.format_exception(type(error), error, trace))
    frame = _last_frame_in(module, trace)
    if frame is None:
        return text
    values = "\n".join(f"    {name} = {_short_repr(value)}" for name, value in frame.f_locals.items())
    return f"{text}local variables of {frame.f_code.co_name}:\n{values}\n"


def _last_frame_in(module: str, trace: TracebackType | None) -> FrameType | None:
    found = None
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == module:
            found = trace.tb_frame
        trace = trace.tb_next
    return found


def _short_repr(value: object) -> str:
    """One line, at most some 300 characters; a value that cannot be shown says so."""
    shortener = reprlib.Repr()
    shortener.maxother = shortener.maxstring = 300
    try:
        return " ".join(shortener.repr(value).split())
    except Exception as error:
        return f"<cannot be shown: {error!r}>"


def _pickled(reply: Reply) -> bytes:
    try:
        return pickle.dumps(reply)
    except Exception as error:
        found = _short_repr(reply.payload)
        return pickle.dumps(
            Reply("failed", f"expected a result that can be pickled, found {found}: {error!r}")
        )
