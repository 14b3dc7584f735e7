"""Where a checkpoint appears, from a path or URL. Here it is a folder, which gets its name when it is whole.

A save writes into ``.NAME.ATTEMPT.partial`` beside the place and renames it. A checkpoint that is replaced exchanges
names with the new one in one step where the system can do that. Elsewhere it is called ``.NAME.old`` for a moment, and
:func:`recover` gives it its name back after a crash in between. Nothing here communicates.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from shardwright.checkpoint.digests import Damaged
from shardwright.checkpoint.folders import METADATA
from shardwright.checkpoint.index import INDEX
from shardwright.checkpoint.objects import ObjectStore
from shardwright.checkpoint.stores import LocalFiles, Store, sync_folder

_AT_FDCWD, _EXCHANGE = -100, 2
_LOCAL_URLS = ("file://", "local://")

Location = (
    str | os.PathLike[str] | Store
)  #: a folder, a URL such as ``s3://bucket/run-7/step-100``, or a store


def store_of(location: Location) -> Store:
    """The place of a checkpoint. Nothing is read, and no package is imported for a URL.

    Raises:
        ValueError: a URL that names no place.
    """
    if isinstance(location, (LocalStore, ObjectStore)):
        return location
    text = os.fspath(location)  # type: ignore[arg-type]
    if not isinstance(location, str) and (found := re.match(r"[a-z][a-z0-9+.-]+:/(?!/)", text)):
        raise ValueError(
            f"{text} is a URL that pathlib has changed: it makes {found[0]} of {found[0]}/. Pass the URL as a string"
        )
    if "://" not in text:
        return LocalStore(Path(text))
    for prefix in _LOCAL_URLS:
        if text.startswith(prefix):
            return LocalStore(Path(text.removeprefix(prefix)))
    return ObjectStore(text)


class LocalStore(LocalFiles):
    """A folder that is renamed when it is whole."""

    def description(self) -> str:
        recover(self.path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path}: there is no checkpoint")
        for name in (INDEX, METADATA):
            if os.path.lexists(self.path / name):
                return name
        raise Damaged(f"the folder has neither {INDEX} nor {METADATA}, so it holds no checkpoint")

    def begin(self, attempt: str, nbytes: int, overwrite: bool) -> None:
        begin(self.path, attempt, nbytes, overwrite)

    def unfinished(self, attempt: str) -> LocalStore:
        return LocalStore(partial_folder(self.path, attempt))

    def check_seen(self) -> None:
        if not self.path.is_dir():
            raise OSError(
                f"{self.path} is not there, though the first rank has made it: all ranks must save to a file system "
                "that they share"
            )

    def commit(self, unfinished: Store) -> None:
        assert isinstance(unfinished, LocalStore)
        commit(unfinished.path, self.path)

    def abandon(self, names: Iterable[str]) -> None:
        abandon(self.path)

    def remove_leftovers(self, attempt: str) -> None:
        remove_leftovers(self.path, attempt)


def new_attempt() -> str:
    """The identity of one save: no two saves have the same."""
    return uuid.uuid4().hex[:16]


def partial_folder(path: Path, attempt: str) -> Path:
    """The folder in which a save writes."""
    return path.parent / f".{path.name}.{attempt}.partial"


def _old(path: Path) -> Path:
    return path.parent / f".{path.name}.old"


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has what marks one, by us or by torch. It may be damaged."""
    return any((path / name).is_file() for name in (INDEX, METADATA))


def begin(path: Path, attempt: str, nbytes: int, overwrite: bool) -> Path:
    """Make the folder in which a save writes.

    Raises:
        FileExistsError: something is there already, and is not to be overwritten, or is no checkpoint.
        OSError: the folder cannot be made, or the disk has less than ``nbytes`` free.
    """
    recover(path)
    check_free(path, overwrite)
    _make_durable(path.parent)
    folder = partial_folder(path, attempt)
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        reason = f"{os.strerror(errno.ENOSPC)}: the checkpoint needs {nbytes:,} bytes, {free:,} are free"
        raise OSError(errno.ENOSPC, reason, str(path))
    folder.mkdir()
    return folder


def check_free(path: Path, overwrite: bool) -> None:
    """Raise FileExistsError if a save must not give this name to its folder."""
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        if not overwrite:
            raise FileExistsError(f"{path} exists. Choose another path, or pass overwrite=True")
        if path.is_symlink() or not is_checkpoint(path):
            raise FileExistsError(f"{path} is no checkpoint, so it is not overwritten. Choose another path")


def _make_durable(folder: Path) -> None:
    """Make a folder and those above it, so that a crash does not lose their names."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def commit(folder: Path, path: Path) -> None:
    """Give a written folder its name. What had the name before is deleted after that.

    Raises:
        OSError: it cannot be renamed. What was there is still there.
    """
    sync_folder(folder)
    if not os.path.lexists(path):
        os.rename(folder, path)
        sync_folder(path.parent)
        return
    if _exchange(folder, path):
        sync_folder(path.parent)
        remove(folder)
        return
    old = _old(path)
    remove(old)
    os.rename(path, old)
    try:
        os.rename(folder, path)
    except OSError:
        os.rename(old, path)
        raise
    sync_folder(path.parent)
    remove(old)


def recover(path: Path) -> None:
    """Finish what a crash has interrupted: a checkpoint that was being replaced gets its name back."""
    old = _old(path)
    if not os.path.lexists(path) and is_checkpoint(old):
        with contextlib.suppress(FileNotFoundError):  # another rank was first
            os.rename(old, path)
        sync_folder(path.parent)


def abandon(folder: Path) -> None:
    """Remove what a failed save has written, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(path: Path, attempt: str) -> None:
    """Remove what killed saves to the same place have left, except for ``attempt``'s."""
    for left in path.parent.glob(f".{_escaped(path.name)}.*.partial"):
        if left != partial_folder(path, attempt):
            shutil.rmtree(left, ignore_errors=True)
    if os.path.lexists(path):
        shutil.rmtree(_old(path), ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a folder, a link or a file, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        # Renamed first, so that a half-removed checkpoint is never under a checkpoint's name.
        doomed = (
            path if path.name.startswith(".") else path.with_name(f".{path.name}.{new_attempt()}.partial")
        )
        if doomed != path:
            os.rename(path, doomed)
        shutil.rmtree(doomed)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step. False where the system or the file system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    done = call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE)
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
