"""The place of a checkpoint, from a path or URL. A folder gets its name when it is whole.

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
import zipfile
from collections.abc import Iterable
from pathlib import Path

from shardwright.checkpoint.format.digests import Damaged
from shardwright.checkpoint.format.index import INDEX, METADATA, VALUES
from shardwright.checkpoint.storage.objects import ObjectStore
from shardwright.checkpoint.storage.stores import LocalFiles, Store, new_attempt, sync_folder

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
    if isinstance(location, Store):
        return location
    if not isinstance(location, (str, os.PathLike)) or isinstance(os.fspath(location), bytes):
        raise TypeError(
            f"path: expected a string or a pathlib.Path, got {type(location).__name__} {location!r:.100}"
        )
    text = os.fspath(location)
    if "\0" in text:
        raise ValueError(f"path: {text!r} has a zero byte, which no file system takes")
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

    def address(self) -> str:
        return str(self.path.absolute())

    def children(self, recovers: bool) -> list[str]:
        for old in self.path.glob(".*.old") if recovers else ():
            with contextlib.suppress(
                OSError
            ):  # of a file system that cannot be written; then the name is not there
                recover(self.path / old.name.removeprefix(".").removesuffix(".old"))
        return [path.name for path in self.path.iterdir() if path.is_dir()] if self.path.is_dir() else []

    def check_writable(self) -> None:
        whole = self.path.absolute()
        there = next(each for each in (whole, *whole.parents) if os.path.lexists(each))
        if not there.is_dir():
            raise NotADirectoryError(f"{self.path} cannot be written: {there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"{self.path} cannot be written: this process may not write in {there}")

    def clear(self) -> None:
        remove(self.path)

    def description(self) -> str:
        recover(self.path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path}: {self._found()}")
        if os.path.lexists(self.path / INDEX):  # whatever .metadata says
            return INDEX
        if not os.path.lexists(self.path / METADATA):
            self._refuse_empty()
            raise Damaged(f"the folder has neither {INDEX} nor {METADATA}, but parts of a checkpoint")
        if os.path.lexists(self.path / VALUES):
            raise Damaged(
                f"{INDEX} is missing beside {VALUES}, so nothing can be compared with its digest; read the folder with "
                "torch.distributed.checkpoint if you trust it"
            )
        return METADATA

    def _found(self) -> str:
        if not self.path.exists():
            return "there is no checkpoint"
        if self.path.is_file() and zipfile.is_zipfile(self.path):
            return (
                "this is a file of torch.save, such as Fabric's full checkpoints, and not the folder of a checkpoint. "
                "Read it with torch.load or fabric.load"
            )
        return "this is a file, and not the folder of a checkpoint"

    def _refuse_empty(self) -> None:
        names = sorted(os.listdir(self.path))
        if any(name.endswith(".distcp") for name in names):
            return
        inside = next((name for name in reversed(names) if is_checkpoint(self.path / name)), None)
        hint = (
            ""
            if inside is None
            else f". It holds folders with checkpoints: load {self.path / inside}, for example"
        )
        raise FileNotFoundError(
            f"{self.path}: the folder has neither {INDEX} nor {METADATA}, so it holds no checkpoint{hint}"
        )

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

    def check_free(self, overwrite: bool) -> None:
        check_free(self.path, overwrite)

    def leave(self, name: str, content: bytes) -> None:
        unnamed = self.path / f"{name}.new"
        unnamed.write_bytes(content)
        os.rename(unnamed, self.path / name)

    def sizes(self) -> dict[str, int]:
        found = {}
        with os.scandir(self.path) as entries:  # unlike a look at one name, never answered from an old cache
            for each in entries:
                with contextlib.suppress(FileNotFoundError):  # it has just got another name
                    found[each.name] = each.stat().st_size
        return found

    def commit(self, unfinished: Store, overwrite: bool) -> None:
        assert isinstance(unfinished, LocalStore)
        commit(unfinished.path, self.path, overwrite)

    def is_removed(self) -> bool:
        return not self.path.exists()

    def abandon(self, names: Iterable[str]) -> None:
        abandon(self.path)

    def remove_leftovers(self, attempt: str) -> None:
        remove_leftovers(self.path, attempt)


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
    make_durable(path.parent)
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
        if not _may_be_replaced(path):
            kind = "a link" if path.is_symlink() else "no checkpoint"
            raise FileExistsError(f"{path} is {kind}, so it is not overwritten. Choose another path")


def _may_be_replaced(path: Path) -> bool:
    """Whether a checkpoint is there: a folder, or a file of ``torch.save``. A link is none."""
    return not path.is_symlink() and (is_checkpoint(path) or (path.is_file() and zipfile.is_zipfile(path)))


def make_durable(folder: Path) -> None:
    """Make a folder and those above it, so that a crash does not lose their names."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def commit(folder: Path, path: Path, overwrite: bool) -> None:
    """Give a written folder or file its name. The earlier owner of the name is deleted after that.

    Raises:
        FileExistsError: a folder with content has this name, and ``overwrite`` is false.
        OSError: it cannot be renamed, or the names cannot be written to disk. Anything there is still there.
    """
    if folder.is_dir():
        sync_folder(folder)
    written = os.stat(folder)
    try:
        replaced = _put_in_place(folder, path, overwrite)
        sync_folder(path.parent)
    except BaseException:
        _take_back(folder, path, written)
        raise
    if replaced is not None:
        with contextlib.suppress(OSError):
            if replaced != folder:  # no half-removed folder is called old, which recover would bring back
                os.rename(replaced, folder)
            remove(folder)


def _put_in_place(folder: Path, path: Path, overwrite: bool) -> Path | None:
    """Rename a folder or file. Returns where the replaced one is now, if there was one."""
    if not overwrite or not os.path.lexists(path):
        try:
            os.rename(folder, path)  # no folder takes the name of one that has content
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise FileExistsError(f"{path}: another save has just written it. Choose another path") from None
        return None
    if _exchange(folder, path):
        return folder
    old = _old(path)
    remove(old)
    os.rename(path, old)
    os.rename(folder, path)
    return old


def _take_back(folder: Path, path: Path, written: os.stat_result) -> None:
    """Give the names back that a failed commit may have changed, as far as that is possible."""
    with contextlib.suppress(OSError):
        if os.path.lexists(path) and os.path.samestat(os.lstat(path), written):
            if not os.path.lexists(folder):
                os.rename(path, folder)
            else:
                _exchange(folder, path)
    with contextlib.suppress(OSError):
        if not os.path.lexists(path) and os.path.lexists(_old(path)):
            os.rename(_old(path), path)
    try:
        sync_folder(path.parent)
    except OSError:
        # Until the names are on disk, a crash could give the checkpoint's name to what a failed save removes. So it is
        # not removed: it gets another name, and the next save that works removes it.
        with contextlib.suppress(OSError):
            os.rename(folder, partial_folder(path, new_attempt()))


def recover(path: Path) -> None:
    """Finish what a crash has interrupted: a checkpoint that was being replaced gets its name back."""
    old = _old(path)
    if os.path.lexists(path) or not _may_be_replaced(old):
        return
    try:
        os.rename(old, path)
    except OSError:
        if not os.path.lexists(path):  # another rank was not faster
            raise
    sync_folder(path.parent)


def abandon(folder: Path) -> None:
    """Remove what a failed save has written, as far as that is possible."""
    with contextlib.suppress(OSError):
        remove(folder)


def remove_leftovers(path: Path, attempt: str) -> None:
    """Remove what killed saves to the same place have left, except for ``attempt``'s."""
    # Exactly such names: a save to ``NAME.more`` may be under way.
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.partial")
    for left in path.parent.iterdir():
        if name.fullmatch(left.name) and left != partial_folder(path, attempt):
            _discard(left, path)
    if os.path.lexists(path):
        _discard(_old(path), path)


def _discard(left: Path, path: Path) -> None:
    # Renamed first: if another process writes this folder after all, it can no longer give it the checkpoint's name. Or
    # it has done so already, and what has the old name is the one that it has replaced.
    doomed = partial_folder(path, new_attempt())
    try:
        os.rename(left, doomed)
    except FileNotFoundError:
        return
    except OSError:
        doomed = left
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.suppress(OSError):
        doomed.unlink()


def remove(path: Path) -> None:
    """Remove a folder, a link or a file, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        # Renamed first, so that a half-removed checkpoint is never under a checkpoint's name, also after a crash.
        doomed = path
        if not path.name.startswith("."):
            doomed = partial_folder(path, new_attempt())
            os.rename(path, doomed)
            sync_folder(path.parent)
        shutil.rmtree(doomed)


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
