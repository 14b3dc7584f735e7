"""How a training job starts and ends: one rank in this process, or several under torch elastic's process layer.

The launcher decides the run's folder, starts the ranks with torchrun's environment, passes signals on to them, and
turns however they end into one message and one exit status. It never trains itself when there are several ranks.

Why not torchrun as a whole: its agent gives ranks 30 s from a signal to their end, which a large checkpoint exceeds,
and the same 30 s to ranks that wait in a collective for one that died. The environment is the same, so
`torchrun -m shardwright train ...` and SLURM work too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext, start_processes

import shardwright
from shardwright.train.agreement import PATIENCE, Statement, agree, facts_of, is_to_report
from shardwright.train.config import Config
from shardwright.train.data import Corpus, load_corpus
from shardwright.train.ending import (
    STOPPED,
    Complaint,
    Ending,
    complaints_in,
    conclude,
    fail,
    log_of,
    stopped_early,
)
from shardwright.train.errors import UserError
from shardwright.train.lock import FolderLock, claim, share
from shardwright.train.loop import NonFiniteError, train
from shardwright.train.parallel import (
    World,
    check_device,
    check_environment,
    check_ranks,
    choose_device,
    collective_timeout,
    join_world,
    pick_device,
    rank_and_size,
    under_launcher,
)
from shardwright.train.runs import (
    RunFolder,
    check_same_job,
    create_run,
    find_run,
    holds_a_run,
    now,
    writing,
)
from shardwright.train.starting import START

SPEAKING = "first rank speaks"
"""Key in the launcher's store: from then on the first rank says what is being done at the start."""
FOLDER_VARIABLE = "SHARDWRIGHT_RUN_FOLDER"
LAUNCHER_VARIABLE = "SHARDWRIGHT_LAUNCHER"
GRACE_SECONDS = 4.0
"""From the first failure to the killing of the other ranks: long enough for them to say what they saw of it."""


def run_train(config: Config, *, nproc: int | None, resume: str | None, argv: list[str]) -> int:
    """Train and return the exit status: 0 done, 1 failed, 130 or 143 stopped by a signal with the state saved.

    `resume` is None for a new run, "" for the newest run of that name, else a run's folder. `argv` is the command
    line, for starting the ranks with. Raises UserError, in one process only, for what the user has to correct.
    """
    check_environment()
    if under_launcher():
        return _run_rank(lambda: config, resume, "--debug" in argv)
    ranks = _ranks_wanted(config, nproc)
    check_ranks(config, ranks)
    check_device(config, choose_device(config))
    folder, lock = _open_folder(config, resume)
    with lock:
        try:
            if ranks > 1:
                return _launch(config, folder, ranks, argv)
            _stay_local()
            START.doing("reading the text")
            corpus = load_corpus(config.data)
            with join_world(config) as world:
                return train(config, folder, corpus, world, resume is not None)
        except (UserError, KeyboardInterrupt):
            _discard_if_unused(folder, lock)
            raise
        except NonFiniteError as error:
            return fail(str(error))


def _ranks_wanted(config: Config, nproc: int | None) -> int:
    gpus = torch.cuda.device_count() if choose_device(config) == "cuda" else 0
    if nproc is not None:
        if gpus and nproc > gpus:
            raise UserError(f"--nproc: expected at most {gpus}, the GPUs of this machine, found {nproc}")
        return nproc
    return max(1, gpus) if config.parallel.engine != "none" else 1


def _open_folder(config: Config, resume: str | None) -> tuple[RunFolder, FolderLock]:
    """The folder of the run, which no other run may use until the lock is released."""
    if resume is None:
        folder = create_run(config)
        with writing(folder.path):
            lock = claim(folder.path)
        if folder.exists():  # another run began and ended here between our look and the lock
            lock.release()
            raise UserError(holds_a_run(folder))
        return folder, lock
    folder = find_run(config, resume)
    check_same_job(folder, config, "--resume")
    with writing(folder.path):
        return folder, claim(folder.path)


def _discard_if_unused(folder: RunFolder, lock: FolderLock) -> None:
    """Remove a folder in which no run began, so that correcting the mistake does not meet its remains."""
    if folder.exists():
        return
    try:
        lock.remove()
        for log in sorted(folder.logs.rglob("*"), reverse=True):
            log.rmdir() if log.is_dir() else log.unlink()
        if folder.logs.exists():
            folder.logs.rmdir()
        folder.path.rmdir()
    except OSError:
        pass  # Not ours alone, or gone: leave it.


def _stay_local() -> None:
    """Ranks of one machine talk over the loopback: gloo else looks the machine's name up, which may lead nowhere."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


# ---------------------------------------------------------------------------------------------------------------
# One rank of several


def refuse_config(error: UserError, debug: bool) -> int:
    """As a rank that could not read its configuration: let the other ranks know, and return the exit status."""
    check_environment()

    def unreadable() -> NoReturn:
        raise error

    return _run_rank(unreadable, None, debug)


def _run_rank(configured: Callable[[], Config], resume: str | None, debug: bool) -> int:
    """Train as one rank. Errors go to the launcher where there is one; under plain torchrun one rank prints them."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher:
        threading.Thread(target=_leave_with, args=(int(launcher),), daemon=True).start()
    store: dist.Store | None = None
    try:
        rank, size = rank_and_size()
        if rank == 0:
            if launcher:
                _contact().set(SPEAKING, "")
            START.begin("waiting for the other ranks")
        # The store must hear of what this rank cannot do, so it is there first.
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=max(collective_timeout(), PATIENCE))))
        config, corpus = _start_together(configured, resume, store, rank, size)
        with join_world(config, store) as world:
            folder, lock = _agree_on_folder(config, resume, world)
            with lock:
                return train(config, folder, corpus, world, resume is not None)
    except BaseException as error:
        complaint = _complaint(error)
        START.end()
        if launcher:
            _send(complaint)
            status = 2 if complaint.kind == "user" else 1
        else:
            status = _report_alone(complaint, store, debug)
        if launcher or debug:  # Of our launcher stderr is a log.
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: destructors of process groups may wait for ranks that will never come.
        os._exit(status)


def _start_together(
    configured: Callable[[], Config], resume: str | None, store: dist.Store, rank: int, size: int
) -> tuple[Config, Corpus]:
    """The configuration and the text, once all ranks have the same. Where one cannot start, all raise its UserError."""
    try:
        config = configured()
        device = pick_device(config)
        START.doing("reading the text")
        corpus = load_corpus(config.data)
        statement = Statement(facts_of(config, corpus.sha256, resume, device.type))
    except UserError as error:
        agree(store, rank, size, Statement({}, str(error)), collective_timeout())
        raise
    START.doing("waiting for the other ranks")
    agree(store, rank, size, statement, collective_timeout())
    store.set_timeout(collective_timeout())
    return config, corpus


def _report_alone(complaint: Complaint, store: dist.Store | None, debug: bool) -> int:
    """Print what ended this rank, with its number unless that is 0; once, where all ranks met the same."""
    statuses = {"user": 2, "interrupted": 128 + signal.SIGINT}
    shared = complaint.kind in ("user", "nonfinite", "interrupted")
    if not shared or store is None or is_to_report(store, complaint.rank, complaint.message):
        hint = "" if debug or shared else " (add --debug to see the traceback)"
        where = f"rank {complaint.rank}: " if complaint.rank or not shared else ""
        print(f"error: {where}{' '.join(complaint.message.split())}{hint}", file=sys.stderr, flush=True)
    if complaint.rank == 0 and shared:
        time.sleep(1.0)  # It may host the store, which the others ask whether this was said.
    return statuses.get(complaint.kind, 1)


def _agree_on_folder(
    config: Config, resume: str | None, world: World
) -> tuple[RunFolder, AbstractContextManager[object]]:
    """The folder the launcher chose; without our launcher the one rank 0 chooses. Rank 0 has the lock."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        folder = RunFolder(Path(chosen))
        return folder, share(folder.path) if world.is_first else nullcontext()
    outcome: list[Any] = [None, None]
    lock: AbstractContextManager[object] = nullcontext()
    if world.is_first:
        try:
            folder, lock = _open_folder(config, resume)
            outcome = [str(folder.path), None]
        except UserError as error:
            outcome = [None, str(error)]
    dist.broadcast_object_list(outcome, src=0)
    path, problem = outcome
    if problem is not None:
        raise UserError(problem)
    return RunFolder(Path(path)), lock


def _complaint(error: BaseException) -> Complaint:
    kind: Literal["user", "nonfinite", "lost contact", "interrupted", "error"] = "error"
    if isinstance(error, UserError):
        kind = "user"
    elif isinstance(error, NonFiniteError):
        kind = "nonfinite"
    elif isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    elif _is_lost_contact(error):
        kind = "lost contact"
    message = str(error) if kind in ("user", "nonfinite") else f"{type(error).__name__}: {error}"
    if kind == "interrupted":
        message = "interrupted"
    return Complaint(int(os.environ["RANK"]), 0, kind, message, traceback.format_exc())


def _is_lost_contact(error: BaseException) -> bool:
    """Whether this is a collective that failed because of another rank."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename == c10d.__file__ or any(sign in str(error) for sign in LOST_CONTACT)


LOST_CONTACT = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "imed out",
    "timeout",
    "[c10d]",
    "gloo/",
)
"""Parts of messages of collectives that fail inside autograd or an engine, where no frame tells. gloo has no class
of its own for them."""


def _send(complaint: Complaint) -> None:
    """Pass a complaint to the launcher through its store: disks may be full."""
    try:
        store = _contact()
        order = store.add("complaints", 1)
        store.set(f"complaint/{complaint.rank}", json.dumps({**asdict(complaint), "order": order}))
    except RuntimeError:
        pass  # The launcher is gone; the log has it all.


def _contact() -> dist.TCPStore:
    """The launcher's store."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def _leave_with(launcher: int) -> None:
    """End this rank when the launcher is killed: nobody else would."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    os._exit(1)


# ---------------------------------------------------------------------------------------------------------------
# The launcher


class RankLogs(LogsSpecs):
    """Where output goes: rank 0's stdout to ours, everything else into the run's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = range(len(envs))
        return LogsDest(
            stdouts={rank: str(self.folder / f"rank-{rank}.stdout") if rank else "" for rank in ranks},
            stderrs={rank: str(log_of(self.folder, rank)) for rank in ranks},
            error_files=dict.fromkeys(ranks, os.devnull),
        )


def _launch(config: Config, folder: RunFolder, ranks: int, argv: list[str]) -> int:
    START.doing(f"starting {ranks} ranks")
    logs = folder.logs / now().replace(":", "")
    with writing(logs):
        logs.mkdir(parents=True, exist_ok=True)
    _stay_local()
    # The store lives here, so it outlives every rank, and its port is the system's choice: no two jobs collide.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # -P: a random.py in the folder where the user works must not take the place of Python's own.
    command = ("-P", "-m", "shardwright", *without_nproc(argv))
    with writing(logs):
        processes = start_processes(
            name="shardwright",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(ranks), command),
            envs={
                rank: environment(rank, ranks, store.port, folder, choose_device(config))
                for rank in range(ranks)
            },
            logs_specs=RankLogs(logs),
        )
    assert isinstance(processes, SubprocessContext)
    watch = Watch(processes, lambda: store.check([SPEAKING]))
    statuses = watch.until_all_ended()
    if all(status == 0 for status in statuses.values()):
        return 0
    if watch.first_signal is not None and not store.check([SPEAKING]):
        return stopped_early(watch.first_signal)
    complaints = complaints_in(store, ranks)
    return conclude(
        Ending(folder, logs, statuses, watch.killed, complaints, watch.first_signal), "--debug" in argv
    )


def without_nproc(argv: list[str]) -> list[str]:
    """The command line for a rank, which must not launch again."""
    kept, skip = [], False
    for argument in argv:
        if skip:
            skip = False
        elif argument == "--nproc":
            skip = True
        elif not argument.startswith("--nproc="):
            kept.append(argument)
    return kept


def environment(rank: int, ranks: int, port: int, folder: RunFolder, device: str) -> dict[str, str]:
    """What torchrun would set for this rank, and where the run is."""
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is the launcher's: rank 0 must not open its own
        FOLDER_VARIABLE: folder.path, LAUNCHER_VARIABLE: os.getpid(),
    }  # fmt: skip
    variables |= START.variables
    if own_path := _path_to_ourselves():
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), own_path]))
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # Each rank would claim all cores.
        variables["OMP_NUM_THREADS"] = max(1, (os.cpu_count() or 1) // ranks)
    return {name: str(value) for name, value in variables.items()}


def _path_to_ourselves() -> str | None:
    """The folder of this package, where this process found it in its working folder, in which ranks do not look."""
    folder = str(Path(shardwright.__file__).resolve().parents[1])
    elsewhere = [path for path in sys.path if path and os.path.abspath(path) != os.getcwd()]
    known = {os.path.realpath(path) for path in elsewhere}
    return None if folder in known or folder != os.path.realpath(os.getcwd()) else folder


class Watch:
    """Waits for the ranks, passes signals on, and ends the rest soon after one has failed."""

    def __init__(self, processes: SubprocessContext, first_rank_speaks: Callable[[], bool]) -> None:
        self.processes, self.first_rank_speaks = processes, first_rank_speaks
        self.first_signal: int | None = None
        self.killed: set[int] = set()
        self._signalled_at = 0.0

    def until_all_ended(self) -> dict[int, int]:
        """Exit statuses by rank, negative for signals."""
        # After start_processes, which installs handlers that would unwind this loop.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        deadline = None
        while running := [rank for rank, status in self._poll().items() if status is None]:
            if deadline is None and any(
                status not in (None, 0, *STOPPED) for status in self._poll().values()
            ):
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                self._kill(running)
                deadline = None
            if START.is_speaking and self.first_rank_speaks():
                START.end()
            time.sleep(0.05)
        START.end()
        statuses = {rank: status for rank, status in self._poll().items() if status is not None}
        for handler in self.processes.subprocess_handlers.values():
            handler.proc.wait()
        return statuses

    def _poll(self) -> Mapping[int, int | None]:
        return {rank: handler.proc.poll() for rank, handler in self.processes.subprocess_handlers.items()}

    def _kill(self, ranks: list[int]) -> None:
        self.killed.update(ranks)
        for rank in ranks:
            self.processes.subprocess_handlers[rank].proc.kill()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        running = [rank for rank, status in self._poll().items() if status is None]
        if self.first_signal is not None and time.monotonic() - self._signalled_at > 1.0:
            self._kill(running)  # asked twice: at once
            return
        if self.first_signal is None:
            self.first_signal, self._signalled_at = number, time.monotonic()
        forwarded = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        for rank in running:
            self.processes.subprocess_handlers[rank].proc.send_signal(forwarded)
