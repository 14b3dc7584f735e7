"""The run's folder at the start of an attempt: found or made, locked, and its record repaired.

One process of a job calls `open_run`: our launcher, a job of one rank, or the first of the ranks that another launcher
has started. Nothing here starts processes or communicates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.train.config import Config
from shardwright.train.config.conflicts.jobs import NEW
from shardwright.train.config.conflicts.table import refuse
from shardwright.train.errors import UserError
from shardwright.train.launch.job_end import JobEnd
from shardwright.train.launch.restarts import goes_on
from shardwright.train.launch.torchrun import GivenUpError, TorchrunLaunch, attempt_before, write_launch
from shardwright.train.run.exits import Outcome, remove_exit
from shardwright.train.run.finding import CONTINUE, discard_if_unused, open_folder
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.lock import FolderLock, claim
from shardwright.train.run.record import repair_record, sessions_of
from shardwright.train.run.same_job import check_same_job
from shardwright.train.run.writing import writing

SECONDS_TO_UNLOCK = 30.0
"""Time that a restart waits for the ranks before it, which may be ending on another host."""


@dataclass(frozen=True)
class OpenedRun:
    """The run's folder in one attempt of a job, as one process uses it.

    Attributes:
        lock: one process of the job has a `FolderLock`, or two: our launcher and its first rank.
        resumes: from a checkpoint.
        job_end: records how the attempt ends.
    """

    lock: AbstractContextManager[object]
    resumes: bool
    job_end: JobEnd

    @property
    def folder(self) -> RunFolder:
        return self.job_end.folder

    @property
    def attempt(self) -> int:
        return self.job_end.attempt

    def discard_if_unused(self) -> None:
        """Release the lock, and remove the folder if no run began in it, for the next try."""
        if isinstance(self.lock, FolderLock):
            discard_if_unused(self.folder, self.lock)


def open_run(config: Config, resume: str | None, launch: TorchrunLaunch | None = None) -> OpenedRun:
    """Return the run's folder, locked: new or to resume; for a later attempt of a launch by torchrun the first one's.

    With `CONTINUE` it is `run.dir`. The run there goes on from its newest checkpoint, or without one from the start.

    Raises:
        UserError: the folder is in use, has the run of another job, or cannot be written, for example; or a new run has
            settings that only a resume takes.
        GivenUpError: the attempt would end as those before.
    """
    before = None if launch is None else attempt_before(config.run, resume, launch)
    with ExitStack() as on_error:
        if before is not None:
            folder, earlier = before
            try:
                earlier.check_worth()
            except GivenUpError as error:
                JobEnd(folder, earlier.attempt).write_exit_file(error.end)
                raise
            lock, attempt = _claim_patiently(folder), earlier.attempt + 1
        elif resume == CONTINUE and (folder := RunFolder(Path(config.run.dir))).exists():
            attempt = sessions_of(folder) + 1
            lock = _claim_patiently(folder)
        else:
            folder, lock = open_folder(config, None if resume == CONTINUE else resume)
            attempt = 1
        on_error.callback(lock.release)
        if folder.exists():
            repair_record(folder)
            if attempt > 1:
                check_same_job(folder, config, "a restart")
        resumes = goes_on(folder) if attempt > 1 else resume not in (None, CONTINUE)
        if not resumes:
            on_error.callback(discard_if_unused, folder, lock)
            refuse(NEW, config)
        remove_exit(folder)
        if launch is not None:
            ends = () if before is None else before[1].ends
            write_launch(folder, replace(launch, attempt=attempt, ends=ends))
        on_error.pop_all()
    return OpenedRun(lock, resumes, JobEnd(folder, attempt))


def _claim_patiently(folder: RunFolder) -> FolderLock:
    deadline = time.monotonic() + SECONDS_TO_UNLOCK
    while True:
        try:
            with writing(folder.path):
                return claim(folder.path)
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def refuse_resume(configured: Callable[[], Config], resume: str | None, end: Outcome) -> None:
    """Write exit.json for a resume that was refused before the folder was open.

    Else a script would take the end of the session before for this one's. Nothing is written if a job uses the folder,
    or if only a configuration that cannot be read names it.
    """
    if not resume:
        return
    try:
        folder = RunFolder(Path(configured().run.dir if resume == CONTINUE else resume))
        if folder.exists():
            with claim(folder.path):
                JobEnd(folder, 1).write_exit_file(end)
    except (UserError, OSError):
        pass
