"""One rank of a job, from its process to its exit status; or all of a job that has only one.

What a rank cannot do it says where it is seen: to our launcher, which then speaks for all, else on its own stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from shardwright.checkpoint.digests import Damaged
from shardwright.comm.noted import noted
from shardwright.train.agreement import (
    MODEL,
    PATIENCE,
    Statement,
    agree,
    facts_of,
    first_of_host,
    is_to_report,
    signs_of_progress,
)
from shardwright.train.config import Config
from shardwright.train.data.dataset import Dataset, load_dataset
from shardwright.train.ending import Complaint, fail
from shardwright.train.environment import (
    FOLDER_VARIABLE,
    LAUNCHER_VARIABLE,
    SPEAKING,
    collective_timeout,
    rank_and_size,
)
from shardwright.train.errors import UserError
from shardwright.train.lock import share
from shardwright.train.loop import train
from shardwright.train.models.shapes import HuggingFaceShape
from shardwright.train.runs import RunFolder, open_folder
from shardwright.train.starting import START
from shardwright.train.trainer import NonFiniteError
from shardwright.train.world import World, join_world, pick_device


def train_alone(config: Config, folder: RunFolder, resumes: bool) -> int:
    """Train with one rank in this process and return the exit status. Raises UserError."""
    START.doing("reading the data")
    dataset = load_dataset(config, progress=True)
    try:
        with join_world(config) as world:
            return train(config, folder, dataset, world, resumes)
    except NonFiniteError as error:
        return fail(str(error))


def run_rank(configured: Callable[[], Config], resume: str | None, debug: bool) -> int:
    """Train as one rank. Errors go to our launcher if there is one. Under plain torchrun one rank prints them."""
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
        config, dataset = _start_together(configured, resume, store, rank, size)
        with join_world(config, store) as world:
            folder, lock = _agree_on_folder(config, resume, world)
            with lock:
                return train(config, folder, dataset, world, resume is not None)
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
) -> tuple[Config, Dataset]:
    """The configuration and the text, once all ranks have the same. Where one cannot start, all raise its UserError."""
    try:
        config = configured()
        device = pick_device(config)
        START.doing("reading the data")
        dataset = first_of_host(
            store, rank, lambda: load_dataset(config, progress=rank == 0, advanced=signs_of_progress(store))
        )
        fingerprints = {**dataset.fingerprints, **_model_fingerprint(config)}
        statement = Statement(facts_of(config, fingerprints, resume, device.type))
    except (UserError, OSError, Damaged) as error:
        agree(store, rank, size, Statement({}, str(error)), collective_timeout())
        raise UserError(str(error)) from error
    START.doing("waiting for the other ranks")
    agree(store, rank, size, statement, collective_timeout())
    store.set_timeout(collective_timeout())
    return config, dataset


def _model_fingerprint(config: Config) -> dict[str, str]:
    """The digest of the files behind `model.path`, under its name in messages. Empty for a model without files."""
    shape = config.model.shape()
    if not isinstance(shape, HuggingFaceShape):
        return {}
    from shardwright.train.models import hf

    return {MODEL: hf.fingerprint(shape)}


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
            folder, lock = open_folder(config, resume)
            outcome = [str(folder.path), None]
        except UserError as error:
            outcome = [None, str(error)]
    with noted("broadcast of the folder", None):
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
    """End this rank when the launcher is killed: nobody else would."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    os._exit(1)
