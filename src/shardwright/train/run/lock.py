"""One run at a time in a folder: a lock of the operating system, which ends with the process that holds it.

Nothing here knows what a run writes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType

from shardwright.train.errors import UserError

NAME = ".lock"
UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Errors of file systems that have no locks: there the folder is used without one."""


class FolderLock:
    """The lock of a run on its folder, held until `release` or the end of the process.

    The system keeps a lock with the open file, so a process that dies gives it up. The file itself stays in the folder
    for the next run, which locks it again.
    """

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder, self._descriptor = folder, descriptor

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def remove(self) -> None:
        """Release the lock and delete its file. For a folder in which no run began, and which is removed next."""
        try:
            (self.folder / NAME).unlink(missing_ok=True)
        finally:
            self.release()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim(folder: Path) -> FolderLock:
    """Take the lock of a folder for a run. Raise a UserError that names the other run if one has it."""
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(descriptor)
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
        # A shared lock is enough to keep other runs out, and the first rank takes it too: see `share`.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return FolderLock(folder, descriptor)
        holder = (
            os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "a process that has just begun"
        )
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            raise
        raise UserError(
            f"{folder}: expected a folder that no run is using, found a run that uses it ({holder}); wait until this "
            "run has ended, or stop it, or set another run.dir"
        ) from None
    return FolderLock(folder, descriptor)


def _lock(descriptor: int) -> None:
    """Take the lock for this process alone. Try again for a quarter of a second.

    A process that calls `is_in_use` also has the lock, for a moment, while it looks. That must not fail a run.
    """
    for seconds in (0.05, 0.2, 0.0):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if not seconds:
                raise
            time.sleep(seconds)


def share(folder: Path) -> FolderLock:
    """Hold the lock that this rank's launcher has claimed, so that it outlives a launcher that is killed."""
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            os.close(descriptor)
            raise UserError(
                f"{folder}: another run has just started in this folder; wait until it has ended"
            ) from None
    return FolderLock(folder, descriptor)


def is_in_use(folder: Path) -> bool:
    """Return whether a run uses the folder now. False where the file system has no locks."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in UNSUPPORTED
    finally:
        os.close(descriptor)
    return False
