"""One rank of a job, from its process to its exit status; or all of a job that has only one.

`train_alone` is a job of one rank that no launcher has started; `train_together` is the same for every other rank. A
`LaunchedRank` leaves the end of the job to our launcher. Ranks that another launcher or framework has started, each an
`IndependentRank`, agree on the one that records it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch.distributed as dist

from shardwright.engine import is_lost_contact
from shardwright.train.config import Config
from shardwright.train.errors import JobError, UserError, steps_done
from shardwright.train.launch.environment import (
    FOLDER_VARIABLE,
    LAUNCHER_VARIABLE,
    SPEAKING,
    attempt_of_launcher,
)
from shardwright.train.launch.forecast import forecast, is_out_of_memory, note_out_of_memory
from shardwright.train.launch.job_end import Complaint, JobEnd, Kind
from shardwright.train.launch.opening import OpenedRun, refuse_resume
from shardwright.train.launch.relay import note_mistake
from shardwright.train.parallel.rank_facts import collective_timeout, rank_and_size
from shardwright.train.parallel.world import World, join_world
from shardwright.train.rank.hang_watch import watched, write_heartbeat
from shardwright.train.rank.rendezvous import fresh_store
from shardwright.train.rank.shared_folder import open_together
from shardwright.train.rank.siblings import watch_start
from shardwright.train.rank.start import read_data, start_together
from shardwright.train.rank.startup_check import PATIENCE, asked, is_to_report, run_on_first
from shardwright.train.report.progress import START
from shardwright.train.run.deadlines import SECONDS_FOR_CAUSE, SECONDS_FOR_FIRST, SECONDS_TO_ASK
from shardwright.train.run.exits import FAILED, TRY_AGAIN, USER_ERROR, Outcome
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.lock import share
from shardwright.train.step.session import train


def train_alone(config: Config, run: OpenedRun) -> int:
    """Train with one rank in this process and return the exit status. Raises what ended the job.

    `train_together` has a store at which ranks compare their data and configuration before one of them opens the
    folder. One rank has nothing to compare, its command has opened the folder `run`, and errors keep their kind for the
    command, which prints them.
    """
    START.doing("reading the data")
    try:
        dataset = read_data(config.for_data, progress=True)
        with (
            join_world(config) as world,
            watched(config.fault, config.train.compile, run.folder.path, run.job_end.write),
        ):
            end = train(config, run, dataset, world)
    except BaseException as error:
        run.job_end.write(complaint_of(error, 0).end)
        raise
    run.job_end.write(end)
    return end.status


def run_rank(configured: Callable[[], Config], resume: str | None, debug: bool) -> int:
    """Train as one rank that a launcher has started, and return its exit status. After an error the process ends."""
    rank, size = rank_and_size()
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    job = LaunchedRank(int(launcher)) if launcher else IndependentRank(configured, resume, debug)
    try:
        # The store must hear of what this rank cannot do, so it is there first.
        store = job.begin(rank, size)
        return train_together(job, configured, resume, store, rank, size).status
    except BaseException as error:
        START.end()
        status = job.failed(complaint_of(error, rank))
        sys.stdout.flush()
        sys.stderr.flush()
        note_mistake(status)
        # Not sys.exit: destructors of process groups may wait for ranks that will never come.
        os._exit(status)


def train_together(
    job: LaunchedRank | IndependentRank,
    configured: Callable[[], Config],
    resume: str | None,
    store: dist.Store,
    rank: int,
    size: int,
    saved: Callable[[RunFolder, int], None] | None = None,
) -> Outcome:
    """Run the job as one of its ranks, which have met at `store`. `saved`: see `train_in_group`."""
    config, dataset = start_together(configured, resume, store, rank, size)
    with join_world(config, store) as world:
        run = job.open(config, resume, world)
        with run.lock, job.watch(config, run, world, store):
            end = train(config, run, dataset, world, saved and partial(saved, run.folder))
            if world.is_first:
                run.job_end.write(end)
    return end


@contextmanager
def _planned(config: Config, run: OpenedRun, world: World, store: dist.Store) -> Iterator[None]:
    """Inside the context the first rank plans the job, as our launcher does. What it refuses all ranks raise."""
    if run.attempt > 1:
        yield
        return
    with ExitStack() as stack:

        def plan() -> None:
            planned = forecast(config, run.folder, world.size, world.device.type)
            if planned is not None:
                stack.callback(planned.stop)
                planned.check()

        try:
            run_on_first(store, "start/planned", plan)  # a plan that may refuse the job takes minutes
        except UserError:
            run.discard_if_unused()
            raise
        yield


class LaunchedRank:
    """A rank of our launcher, which gets its complaints, prints, judges the heartbeats and writes exit.json."""

    def __init__(self, launcher: int) -> None:
        self.launcher = launcher  #: its process

    def begin(self, rank: int, size: int) -> dist.Store:
        """Meet the other ranks. Returns the store that all share."""
        threading.Thread(target=leave_with, args=(self.launcher,), daemon=True).start()
        if rank == 0:
            _contact().set(SPEAKING, "")
            START.begin("meeting the other ranks")
        return _met(rank, size)

    def open(self, config: Config, resume: str | None, world: World) -> OpenedRun:
        """Return the folder that the launcher chose. The first rank shares its lock."""
        folder = RunFolder(Path(os.environ[FOLDER_VARIABLE]))
        lock = share(folder.path) if world.is_first else nullcontext()
        return OpenedRun(lock, resume is not None, JobEnd(folder, attempt_of_launcher(), speaks=False))

    def watch(
        self, config: Config, run: OpenedRun, world: World, store: dist.Store
    ) -> AbstractContextManager[None]:
        write_heartbeat(config.fault, config.train.compile, world.rank, world.size, run.folder.path)
        return nullcontext()

    def failed(self, complaint: Complaint) -> int:
        """Pass the complaint to the launcher through its store: disks may be full. Returns this rank's exit status."""
        try:
            store = _contact()
            order = store.add("complaints", 1)
            store.set(f"complaint/{complaint.rank}", json.dumps({**asdict(complaint), "order": order}))
        except RuntimeError:
            pass  # The launcher is gone; the log has it all.
        print(complaint.trace, end="", file=sys.stderr)  # a log
        return USER_ERROR if complaint.kind == "user" else FAILED


def _met(rank: int, size: int) -> dist.Store:
    """Return the store of the ranks of this attempt."""
    patience = max(collective_timeout(), PATIENCE)
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=patience)))
    return fresh_store(store, rank, size, patience.total_seconds())


def _contact() -> dist.TCPStore:
    """Return the launcher's store."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def leave_with(launcher: int) -> None:
    """End this rank when the launcher is killed: nobody else would. The first rank records the end of the job."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    try:
        if os.environ["RANK"] == "0":
            folder = RunFolder(Path(os.environ[FOLDER_VARIABLE]))
            JobEnd(folder, attempt_of_launcher()).write(Outcome(TRY_AGAIN, "the launcher was killed"))
        else:
            time.sleep(SECONDS_FOR_FIRST)  # It would else find that this rank has gone, and report that.
    finally:
        os._exit(TRY_AGAIN)


class IndependentRank:
    """A rank of torchrun, SLURM or a framework. The ranks agree on the one that prints and records the end of the job.

    Args:
        configured: the configuration, which is read again if the job ends before the run's folder is open.
        resume: the run to go on with, if any.
        debug: print the traceback of an error.
        store: of ranks that have met. Others meet in `begin`.
    """

    def __init__(
        self,
        configured: Callable[[], Config],
        resume: str | None,
        debug: bool = False,
        store: dist.Store | None = None,
    ) -> None:
        self.configured, self.resume, self.debug = configured, resume, debug
        self._store = store
        self.run: OpenedRun | None = None
        self._begun = threading.Event()

    def begin(self, rank: int, size: int) -> dist.Store:
        """Meet the other ranks. Returns the store that all share."""
        if rank == 0:
            START.begin("meeting the other ranks")
        watch_start(rank, self.configured, self._record, self._begun)
        self._store = _met(rank, size)
        return self._store

    def open(self, config: Config, resume: str | None, world: World) -> OpenedRun:
        self.run = open_together(config, resume, world)
        return self.run

    @contextmanager
    def watch(self, config: Config, run: OpenedRun, world: World, store: dist.Store) -> Iterator[None]:
        with watched(config.fault, config.train.compile, run.folder.path, run.job_end.write):
            self._begun.set()
            with _planned(config, run, world, store):
                yield

    def failed(self, complaint: Complaint) -> int:
        """Print and record the complaint, unless another rank does. Returns this rank's exit status."""
        if threading.current_thread() is threading.main_thread():
            # torchrun sends it to all ranks once one has failed. The end would else not be recorded.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._print(complaint)
        self.record_failure(complaint)
        if self.debug:
            print(complaint.trace, end="", file=sys.stderr)
        return complaint.end.status

    def _print(self, complaint: Complaint) -> None:
        """Print the complaint, with the number of the rank unless that is 0; once, where all ranks met the same."""
        shared = complaint.is_shared
        if not shared or self._store is None or is_to_report(self._store, complaint.rank, complaint.message):
            hint = "" if self.debug or shared else " (add --debug to see the traceback)"
            where = f"rank {complaint.rank}: " if complaint.rank or not shared else ""
            print(f"error: {where}{complaint.in_line}{hint}", file=sys.stderr, flush=True)
        if complaint.rank == 0 and shared:
            time.sleep(SECONDS_TO_ASK)

    def record_failure(self, complaint: Complaint) -> None:
        """Record the end of the job, if this rank is the one to do so: best one with an error of its own."""
        if self.run is None:
            if complaint.kind == "user" and complaint.rank == 0:
                self._record(complaint.end)
            return
        if complaint.kind == "lost contact":
            time.sleep(SECONDS_FOR_CAUSE)
        store, own = self._store, str(complaint.rank)
        first = asked(lambda: store.compare_set("end", "", own).decode(), "") if store is not None else ""
        # Without an answer the store has gone with the first rank.
        if first == own or (not first and not self.run.folder.exit_file.exists()):
            self._record(complaint.end)
            for line in note_out_of_memory(self.run.folder) if complaint.out_of_memory else ():
                print(line, file=sys.stderr, flush=True)

    def _record(self, end: Outcome) -> None:
        if self.run is not None:
            self.run.job_end.write(end)
        else:
            refuse_resume(self.configured, self.resume, end)


KINDS: dict[int, Kind] = {UserError.MISTAKE: "user", UserError.PASSING: "passing"}
"""Kinds by the status of an error that all ranks meet; "fault" for others."""


def complaint_of(error: BaseException, rank: int) -> Complaint:
    """Return what a rank says of the error that ended it. The kind says whether all ranks met the error."""
    kind: Kind = "error"
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, JobError):
        kind, message = KINDS.get(error.status, "fault"), str(error)
    elif isinstance(error, KeyboardInterrupt):
        kind = message = "interrupted"
    elif is_lost_contact(error):
        kind = "lost contact"
    trace = traceback.format_exc()
    return Complaint(rank, 0, kind, message, trace, steps_done(error), is_out_of_memory(error))
