"""One rank of a job, from its process to its exit status; or all of a job that has only one.

What a rank cannot do it says where it is seen: to our launcher, which then speaks for all, else on its own stderr.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from shardwright.checkpoint import Damaged
from shardwright.comm.noted import noted
from shardwright.train.config import Config
from shardwright.train.config.catalog.shapes import HuggingFaceShape, PythonShape
from shardwright.train.data.dataset import Dataset, check_special_tokens, load_dataset
from shardwright.train.errors import UserError, steps_done
from shardwright.train.launch.attempts import GivenUpError, open_attempt, record_end, this_launch
from shardwright.train.launch.ending import Complaint, fail
from shardwright.train.launch.environment import (
    FOLDER_VARIABLE,
    LAUNCHER_VARIABLE,
    SPEAKING,
    attempt_of_launcher,
    collective_timeout,
    rank_and_size,
)
from shardwright.train.launch.hosts import check_shared, use_one_network
from shardwright.train.launch.progress import START
from shardwright.train.launch.relay import note_mistake
from shardwright.train.launch.rendezvous import fresh_store
from shardwright.train.parallel.world import World, join_world, pick_device
from shardwright.train.rank.hang_watch import watched, write_board
from shardwright.train.rank.siblings import watch_start
from shardwright.train.rank.startup_check import (
    MODEL,
    PATIENCE,
    Statement,
    agree,
    asked,
    facts_of,
    first_of_host,
    is_to_report,
    signs_of_progress,
)
from shardwright.train.run.exits import FAILED, INTERRUPTED, TRY_AGAIN, USER_ERROR, End, write_exit
from shardwright.train.run.folder import CONTINUE, RunFolder, discard_if_unused
from shardwright.train.run.lock import FolderLock, claim, share
from shardwright.train.run.record import close_session
from shardwright.train.step.loop import train
from shardwright.train.step.numerics.fault import NonFiniteError
from shardwright.train.step.numerics.verifying import CorruptionError
from shardwright.train.step.signal_answers import SECONDS_FOR_FIRST


def train_alone(config: Config, folder: RunFolder, resumes: bool, attempt: int = 1) -> int:
    """Train with one rank in this process and return the exit status. Raises UserError."""
    START.doing("reading the data")
    try:
        dataset = _read_data(config, progress=True)
        with (
            join_world(config) as world,
            watched(config, folder.path, lambda end: write_exit(folder, end, attempt)),
        ):
            end = train(config, folder, dataset, world, resumes, attempt)
    except NonFiniteError as error:
        end = End(FAILED, str(error), done=steps_done(error))
        fail(end.reason)
    except CorruptionError as error:
        end = End(TRY_AGAIN, str(error))
        fail(end.reason)
    except BaseException as error:
        write_exit(folder, _end_of(_complaint(error, 0)), attempt)
        raise
    write_exit(folder, end, attempt)
    return end.status


def run_rank(configured: Callable[[], Config], resume: str | None, debug: bool) -> int:
    """Train as one rank. Errors go to our launcher if there is one. Under plain torchrun one rank prints them."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher:
        threading.Thread(target=_leave_with, args=(int(launcher),), daemon=True).start()
    store: dist.Store | None = None
    place: Place | None = None

    def record(end: End) -> None:
        if place is not None:
            close_session(place.folder, end)
            _record(place, end)
        elif resume:
            _record_mistake(_folder_to_resume(configured, resume), end)

    try:
        rank, size = rank_and_size()
        if rank == 0:
            if launcher:
                _contact().set(SPEAKING, "")
            START.begin("waiting for the other ranks")
        begun = threading.Event() if launcher else watch_start(rank, configured, record)
        # The store must hear of what this rank cannot do, so it is there first.
        patience = max(collective_timeout(), PATIENCE)
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=patience)))
        store = fresh_store(store, rank, size, patience.total_seconds())
        config, dataset = start_together(configured, resume, store, rank, size)
        with join_world(config, store) as world:
            place = _agree_on_place(config, resume, world)
            with place.lock, _watched(config, place, rank, size, launched=bool(launcher)):
                begun.set()
                end = train(config, place.folder, dataset, world, place.resumes, place.attempt)
                if world.is_first and not launcher:
                    _record(place, end)
        return end.status
    except BaseException as error:
        complaint = _complaint(error, int(os.environ["RANK"]))
        START.end()
        if launcher:
            _send(complaint)
            status = USER_ERROR if complaint.kind == "user" else FAILED
        else:
            if threading.current_thread() is threading.main_thread():
                # torchrun sends it to all ranks once one has failed. The end would else not be recorded.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            status = _report_alone(complaint, store, debug)
            if _is_to_record(complaint, store, place):
                record(_end_of(complaint))
        if launcher or debug:  # Of our launcher stderr is a log.
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        note_mistake(status)
        # Not sys.exit: destructors of process groups may wait for ranks that will never come.
        os._exit(status)


def _watched(
    config: Config, place: Place, rank: int, size: int, launched: bool
) -> AbstractContextManager[None]:
    """The watch of this rank. Our launcher judges boards itself."""
    if launched:
        write_board(config, rank, size, place.folder.path)
        return nullcontext()

    def record(end: End) -> None:
        close_session(place.folder, end)
        _record(place, end)

    return watched(config, place.folder.path, record)


def start_together(
    configured: Callable[[], Config], resume: str | None, store: dist.Store, rank: int, size: int
) -> tuple[Config, Dataset]:
    """The configuration and the text, once all ranks have the same. Where one cannot start, all raise its UserError."""
    try:
        config = configured()
        device = pick_device(config)
        START.doing("reading the data")
        dataset = first_of_host(
            store, rank, lambda: _read_data(config, progress=rank == 0, advanced=signs_of_progress(store))
        )
        fingerprints = {**dataset.fingerprints, **_model_fingerprint(config)}
        statement = Statement(facts_of(config, fingerprints, resume, device.type))
    except (UserError, OSError, Damaged) as error:
        agree(store, rank, size, Statement({}, str(error)), collective_timeout())
        raise UserError(str(error)) from error
    START.doing("waiting for the other ranks")
    agree(store, rank, size, statement, collective_timeout())
    use_one_network(store, rank, size)
    store.set_timeout(collective_timeout())
    return config, dataset


def _read_data(
    config: Config, progress: bool = False, advanced: Callable[[], None] = lambda: None
) -> Dataset:
    dataset = load_dataset(config, progress, advanced)
    check_special_tokens(config, dataset)
    return dataset


def _model_fingerprint(config: Config) -> dict[str, str]:
    """The digest of the files behind `model.path`, or of the file of `model.target`, under its name in messages. Empty
    for a model without files."""
    shape = config.model.shape()
    if isinstance(shape, PythonShape):
        return _code_fingerprint(shape.target.partition(":")[0])
    if not isinstance(shape, HuggingFaceShape):
        return {}
    from shardwright.train.models.hf import transformers_model

    return {MODEL: transformers_model.fingerprint(shape)}


STATUSES = {"user": USER_ERROR, "passing": TRY_AGAIN, "lost contact": TRY_AGAIN, "interrupted": INTERRUPTED}
"""By the kind of a complaint; 1 for others."""
SHARED = ("user", "passing", "nonfinite", "interrupted")
"""Kinds that all ranks meet."""


def _code_fingerprint(module: str) -> dict[str, str]:
    """The digest of a module's file. Empty if it is not found; building the model says so."""
    try:
        spec = importlib.util.find_spec(module)
        file = Path(spec.origin) if spec is not None and spec.origin is not None else None
        return (
            {} if file is None else {f"the file of {module}": hashlib.sha256(file.read_bytes()).hexdigest()}
        )
    except (ImportError, OSError, ValueError):
        return {}


def _report_alone(complaint: Complaint, store: dist.Store | None, debug: bool) -> int:
    """Print what ended this rank, with its number unless that is 0; once, where all ranks met the same."""
    shared = complaint.kind in SHARED
    if not shared or store is None or is_to_report(store, complaint.rank, complaint.message):
        hint = "" if debug or shared else " (add --debug to see the traceback)"
        where = f"rank {complaint.rank}: " if complaint.rank or not shared else ""
        print(f"error: {where}{complaint.in_line}{hint}", file=sys.stderr, flush=True)
    if complaint.rank == 0 and shared:
        time.sleep(1.0)  # It may host the store, which the others ask whether this was said.
    return STATUSES.get(complaint.kind, FAILED)


SECONDS_FOR_CAUSE = 1.0
"""Seconds that a rank which lost contact leaves to the rank that caused it, to record its error."""


def _is_to_record(complaint: Complaint, store: dist.Store | None, place: Place | None) -> bool:
    """Whether this rank writes how the job ended, without our launcher. One does, best with an error of its own."""
    if place is None:
        return complaint.kind == "user" and complaint.rank == 0
    if complaint.kind == "lost contact":
        time.sleep(SECONDS_FOR_CAUSE)
    own = str(complaint.rank)
    if store is not None and (first := asked(lambda: store.compare_set("end", "", own).decode(), "")):
        return first == own
    return not place.folder.exit_file.exists()  # The store has gone with the first rank.


def end_of(error: BaseException, rank: int) -> End:
    """The end of a job that this error of this rank describes."""
    return _end_of(_complaint(error, rank))


def _end_of(complaint: Complaint) -> End:
    """The end of a job that this complaint describes."""
    rank = None if complaint.kind in SHARED else complaint.rank
    return End(STATUSES.get(complaint.kind, FAILED), complaint.in_line, rank, done=complaint.done)


def _record(place: Place, end: End) -> None:
    """Write how this attempt of the job ended. Our launcher does this itself."""
    record_end(place.folder, end)
    write_exit(place.folder, end, place.attempt)


def _folder_to_resume(configured: Callable[[], Config], resume: str) -> RunFolder | None:
    """The folder in which a run was to go on. None if only the configuration has it, and that cannot be read."""
    if resume != CONTINUE:
        return RunFolder(Path(resume))
    try:
        return RunFolder(Path(configured().run.dir))
    except UserError:
        return None


def _record_mistake(folder: RunFolder | None, end: End) -> None:
    """Write exit.json for a resume that was refused, so that nobody takes the one of the session before for it."""
    if folder is None or not folder.exists():
        return
    try:
        with claim(folder.path):
            write_exit(folder, end, 1)
    except (UserError, OSError):
        pass  # A job uses the folder, or it cannot be written.


@dataclass(frozen=True)
class Place:
    """The folder of the run in this attempt, whether it resumes there, and the lock that this rank has."""

    folder: RunFolder
    lock: AbstractContextManager[object]
    resumes: bool
    attempt: int


def _agree_on_place(config: Config, resume: str | None, world: World) -> Place:
    """The folder that the launcher chose; without our launcher the one that rank 0 chooses. Rank 0 has the lock."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        folder = RunFolder(Path(chosen))
        lock = share(folder.path) if world.is_first else nullcontext()
        return Place(folder, lock, resume is not None, attempt_of_launcher())
    launch = this_launch(world.size)
    place: Place | None = None
    outcome: list[Any] = [None, None]
    if world.is_first:
        try:
            opened = open_attempt(config, resume, launch)
            place = Place(opened.folder, opened.lock, opened.resumes, opened.attempt)
            outcome = [(os.path.abspath(place.folder.path), place.resumes, place.attempt), None]
        except (UserError, GivenUpError) as error:
            outcome = [None, error]
    with noted("broadcast of the folder", None):
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    path, resumes, attempt = outcome[0]
    place = place or Place(RunFolder(Path(path)), nullcontext(), resumes, attempt)
    check_place(place, world)
    return place


def check_place(place: Place, world: World) -> None:
    """Raise UserError on every rank if a rank does not see the files of the first rank in the run's folder."""
    try:
        check_shared(place.folder.path, world.is_first)
    except UserError:
        if isinstance(place.lock, FolderLock):
            discard_if_unused(place.folder, place.lock)
        raise


def _complaint(error: BaseException, rank: int) -> Complaint:
    kind: Literal["user", "passing", "nonfinite", "lost contact", "interrupted", "error"] = "error"
    if isinstance(error, UserError):
        kind = "user" if error.status == USER_ERROR else "passing"
    elif isinstance(error, NonFiniteError | GivenUpError):
        kind = "nonfinite"
    elif isinstance(error, CorruptionError):
        kind = "passing"
    elif isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    elif _is_lost_contact(error):
        kind = "lost contact"
    message = str(error) if kind in ("user", "passing", "nonfinite") else f"{type(error).__name__}: {error}"
    if kind == "interrupted":
        message = "interrupted"
    return Complaint(rank, 0, kind, message, traceback.format_exc(), steps_done(error))


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
"""Parts of the messages of collectives that fail inside autograd or an engine. There no frame shows that a collective
failed, and gloo has no exception class of its own."""


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
    """End this rank when the launcher is killed: nobody else would. The first rank writes what happened."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    try:
        if os.environ["RANK"] == "0":
            folder, end = (
                RunFolder(Path(os.environ[FOLDER_VARIABLE])),
                End(TRY_AGAIN, "the launcher was killed"),
            )
            close_session(folder, end)
            write_exit(folder, end, attempt_of_launcher())
        else:
            time.sleep(SECONDS_FOR_FIRST)  # It would else find that this rank has gone, and report that.
    finally:
        os._exit(TRY_AGAIN)
