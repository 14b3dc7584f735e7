"""A job makes the folder of a new run, or finds the folder of the run to go on with, and takes its lock."""

from __future__ import annotations

import re
import shlex
from datetime import datetime
from pathlib import Path

from shardwright.checkpoint import check_writable
from shardwright.train.config import Config, RunConfig, with_special_tokens
from shardwright.train.errors import UserError, as_user_errors
from shardwright.train.run.folder import (
    RUNS,
    RunFolder,
    checkpoints_of,
    newest_saved,
    open_for_writing,
    runs_near,
)
from shardwright.train.run.lock import FolderLock, claim
from shardwright.train.run.position import FolderOrUrl, saved_steps
from shardwright.train.run.same_job import check_same_job
from shardwright.train.run.writing import unwritable, writing

CONTINUE = "--continue"
"""A value in place of a run to resume: `run.dir`, from the newest checkpoint if it has one; else a new run there."""


def create_run(run: RunConfig) -> RunFolder:
    """Make the folder of a new run: `run.dir`, or runs/NAME-TIME. Raises UserError if `run.dir` holds a run."""
    if run.dir:
        _check_name(run.dir)
        folder = RunFolder(Path(run.dir))
        if folder.exists():
            raise UserError(holds_a_run(folder))
    else:
        folder = RunFolder(_unique_folder(f"{run.name}-{datetime.now():%Y%m%d-%H%M%S}"))
    open_for_writing(folder.path, "run.dir")
    return folder


def _check_name(path: str) -> None:
    """Raise if run.json and config.toml, which are UTF-8, cannot store the name."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"run.dir: expected a folder whose name is UTF-8 text, found {path!a}; choose another name, or set "
            "PYTHONUTF8=1 where the locale is not UTF-8"
        ) from None


def holds_a_run(folder: RunFolder) -> str:
    path = shlex.quote(str(folder.path))
    found = f"run.dir: expected a folder without a run, found one in {folder.path}"
    try:
        saved = newest_saved(folder) is not None
    except OSError:  # of a store
        saved = True
    if saved:
        return f"{found}; continue it with --resume {path}, or set another folder"
    return f"{found}, which has saved nothing; add --continue to start it again there, or set another folder"


def _unique_folder(name: str) -> Path:
    attempt = 1
    while True:
        path = RUNS / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.is_dir():
                raise UserError(f"{RUNS}: expected a folder to keep runs in, found something else") from None
            attempt += 1
        except OSError as error:
            raise UserError(unwritable(path, error)) from error


def find_run(run: RunConfig, resume: str) -> RunFolder:
    """Return the run to continue: the folder `resume`. For "" it is `run.dir`, else the newest run with that name."""
    if resume or run.dir:
        folder = RunFolder(Path(resume or run.dir))
        if not folder.exists():
            raise UserError(
                f"--resume: expected the folder of a run, found none in {folder.path}{runs_near(folder.path)}"
            )
        return folder
    pattern = re.compile(re.escape(run.name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    runs = []
    for path in RUNS.iterdir() if RUNS.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and RunFolder(path).exists():
            runs.append((match[1], int(match[2] or 1), path))
    if not runs:
        raise UserError(
            f"--resume: expected a run named {run.name} in {RUNS}, found none; pass the folder of a run that "
            f"was started with run.dir{runs_near(RUNS)}"
        )
    return RunFolder(max(runs)[2])


def as_saved(config: Config, resume: str) -> Config:
    """Return the configuration for going on with a run, with the run's own `data.special_tokens` and `model.vocab_size`
    unless it has them.

    `resume`: as for :func:`find_run`, or CONTINUE, whose run need not exist yet.
    """
    if resume == CONTINUE and not RunFolder(Path(config.run.dir)).exists():
        return config
    try:
        saved = find_run(config.run, "" if resume == CONTINUE else resume).config()
    except UserError:
        return config  # the job says so when it opens the folder
    config = with_special_tokens(config, saved.data.special_tokens)
    same_kind = config.model.kind == saved.model.kind and config.model.vocab_size is None
    if not same_kind or saved.model.vocab_size is None:
        return config
    model = config.model.model_copy(update={"vocab_size": saved.model.vocab_size})
    return config.model_copy(update={"model": model})


def open_folder(config: Config, resume: str | None) -> tuple[RunFolder, FolderLock]:
    """Return the folder of the run, and its lock. No other run may use the folder until the lock is released."""
    if resume is None:
        folder = create_run(config.run)
        with writing(folder.path):
            lock = claim(folder.path)
        if folder.exists():  # another run began and ended here after our check and before the lock
            lock.release()
            raise UserError(holds_a_run(folder))
        try:
            _check_unused(checkpoints_of(folder, config.checkpoint))
        except BaseException:
            discard_if_unused(folder, lock)
            raise
        return folder, lock
    folder = find_run(config.run, resume)
    check_same_job(folder, config, "--resume")
    with writing(folder.path):
        return folder, claim(folder.path)


def _check_unused(checkpoints: FolderOrUrl) -> None:
    """Raise UserError if a new run must not write its checkpoints there. Finds a store that cannot be used, too."""
    with as_user_errors(OSError, prefix="checkpoint.folder: "):
        steps = saved_steps(checkpoints)
        if not steps:
            check_writable(checkpoints)
    if steps:
        raise UserError(
            f"checkpoint.folder: expected no checkpoint of another run in {checkpoints}, found step-{steps[0]}; choose "
            "another checkpoint.folder or run.dir"
        )


def discard_if_unused(folder: RunFolder, lock: FolderLock) -> None:
    """Release the lock, and remove a folder in which no run began, so that the next try does not find its files."""
    if folder.exists():
        lock.release()
        return
    try:
        lock.remove()
        for log in sorted(folder.logs.rglob("*"), reverse=True):
            log.rmdir() if log.is_dir() else log.unlink()
        if folder.logs.exists():
            folder.logs.rmdir()
        folder.path.rmdir()
    except OSError:
        pass  # The folder has other files, or no longer exists.
