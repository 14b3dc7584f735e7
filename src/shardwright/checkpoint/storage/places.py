"""The place of a checkpoint, from a path or URL. A folder or file gets its name when it is whole.

A save writes into ``.NAME.ATTEMPT.partial`` beside the place and renames it. What is replaced exchanges names with the
new one in one step where the system can do that. Elsewhere it is called ``.NAME.old`` for a moment, and
:meth:`LocalStore.recover` gives it its name back after a crash in between. Nothing here communicates.
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
from typing import Self

from shardwright.checkpoint.format.names import INDEX, METADATA, VALUES, may_be_checkpoint
from shardwright.checkpoint.storage.objects import ObjectStore
from shardwright.checkpoint.storage.stores import LocalFiles, Store, new_attempt, unless_removed
from shardwright.durable import make_folder, sync_folder
from shardwright.errors import Damaged

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
    """The folder of a checkpoint, which is renamed when it is whole.

    A subclass is a place of something else: it decides what may be replaced, and what a save begins with.
    """

    def children(self, recovers: bool) -> list[str]:
        for old in self.path.glob(".*.old") if recovers else ():
            with contextlib.suppress(
                OSError
            ):  # of a file system that cannot be written; then the name is not there
                LocalStore(self.path / old.name.removeprefix(".").removesuffix(".old")).recover()
        return [path.name for path in self.path.iterdir() if _may_be(path)] if self.path.is_dir() else []

    def check_writable(self) -> None:
        whole = self.path.absolute()
        there = next(each for each in (whole, *whole.parents) if os.path.lexists(each))
        if not there.is_dir():
            raise NotADirectoryError(f"{self.path} cannot be written: {there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"{self.path} cannot be written: this process may not write in {there}")

    def clear(self) -> None:
        """Also remove a link or a file, and nothing if nothing is there."""
        path = self.path
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

    def description(self) -> str:
        self.recover()
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
        inside = next((name for name in reversed(names) if has_description(self.path / name)), None)
        hint = (
            ""
            if inside is None
            else f". It holds folders with checkpoints: load {self.path / inside}, for example"
        )
        raise FileNotFoundError(
            f"{self.path}: the folder has neither {INDEX} nor {METADATA}, so it holds no checkpoint{hint}"
        )

    # -- whole or absent --

    def unfinished(self, attempt: str) -> Self:
        return type(self)(partial_folder(self.path, attempt))

    def check_free(self, overwrite: bool) -> None:
        """Raise FileExistsError if something is here that is not to be overwritten."""
        path = self.path
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            if not overwrite:
                raise FileExistsError(f"{path} exists. Choose another path, or pass overwrite=True")
            if not self.may_be_replaced(path):
                kind = "a link" if path.is_symlink() else "no checkpoint"
                raise FileExistsError(f"{path} is {kind}, so it is not overwritten. Choose another path")

    def may_be_replaced(self, path: Path) -> bool:
        """Whether a checkpoint is at a path: a folder, or a file of ``torch.save``. A link is none."""
        return not path.is_symlink() and (
            has_description(path) or (path.is_file() and zipfile.is_zipfile(path))
        )

    def begin(self, attempt: str, nbytes: int, overwrite: bool) -> None:
        self.recover()
        self.check_free(overwrite)
        make_folder(self.path.parent)
        free = shutil.disk_usage(self.path.parent).free
        if free < nbytes:
            reason = f"{os.strerror(errno.ENOSPC)}: the checkpoint needs {nbytes:,} bytes, {free:,} are free"
            raise OSError(errno.ENOSPC, reason, str(self.path))
        self._make_unfinished(partial_folder(self.path, attempt))

    def _make_unfinished(self, path: Path) -> None:
        path.mkdir()

    def check_seen(self) -> None:
        if not self.path.is_dir():
            raise OSError(
                f"{self.path} is not there, though the first rank has made it: all ranks must save to a file system "
                "that they share"
            )

    def sizes(self) -> dict[str, int]:
        found = {}
        with os.scandir(self.path) as entries:  # unlike a look at one name, never answered from an old cache
            for each in entries:
                with contextlib.suppress(FileNotFoundError):  # it has just got another name
                    found[each.name] = each.stat().st_size
        return found

    def commit(self, unfinished: Store, overwrite: bool) -> None:
        """Give a written folder or file its name. The earlier owner of the name is deleted after that."""
        assert isinstance(unfinished, LocalStore)
        self.check_free(overwrite)
        with unless_removed(self, unfinished):
            self._give_name(unfinished, overwrite)
        with contextlib.suppress(OSError):  # the checkpoint is in its place
            self._remove_leftovers()

    def _give_name(self, unfinished: LocalStore, overwrite: bool) -> None:
        written = unfinished.path
        if written.is_dir():
            sync_folder(written)
        identity = os.stat(written)
        try:
            replaced = self._put_in_place(written, overwrite)
            sync_folder(self.path.parent)
        except BaseException:
            self._take_back(written, identity)
            raise
        if replaced is not None:
            with contextlib.suppress(OSError):
                if (
                    replaced != written
                ):  # no half-removed folder is called old, which recover would bring back
                    os.rename(replaced, written)
                unfinished.clear()

    def _put_in_place(self, written: Path, overwrite: bool) -> Path | None:
        """Rename a folder or file. Returns where the replaced one is now, if there was one."""
        path = self.path
        if not overwrite or not os.path.lexists(path):
            try:
                self._take_name(written)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                raise FileExistsError(
                    f"{path}: another save has just written it. Choose another path"
                ) from None
            return None
        if _exchange(written, path):
            return written
        old = _old(path)
        LocalStore(old).clear()
        os.rename(path, old)
        os.rename(written, path)
        return old

    def _take_name(self, written: Path) -> None:
        os.rename(written, self.path)  # no folder takes the name of one that has content

    def _take_back(self, written: Path, identity: os.stat_result) -> None:
        """Give the names back that a failed commit may have changed, as far as that is possible."""
        path = self.path
        with contextlib.suppress(OSError):
            if os.path.lexists(path) and os.path.samestat(os.lstat(path), identity):
                if not os.path.lexists(written):
                    os.rename(path, written)
                else:
                    _exchange(written, path)
        with contextlib.suppress(OSError):
            if not os.path.lexists(path) and os.path.lexists(_old(path)):
                os.rename(_old(path), path)
        try:
            sync_folder(path.parent)
        except OSError:
            # Until the names are on disk, a crash could give the checkpoint's name to what a failed save removes. So it
            # is not removed: it gets another name, and the next save that works removes it.
            with contextlib.suppress(OSError):
                os.rename(written, partial_folder(path, new_attempt()))

    def recover(self) -> None:
        """Finish what a crash has interrupted: what was being replaced gets its name back."""
        old = _old(self.path)
        if os.path.lexists(self.path) or not self.may_be_replaced(old):
            return
        try:
            os.rename(old, self.path)
        except OSError:
            if not os.path.lexists(self.path):  # another rank was not faster
                raise
        sync_folder(self.path.parent)

    def is_removed(self) -> bool:
        return not self.path.exists()

    def abandon(self, names: Iterable[str]) -> None:
        with contextlib.suppress(OSError):
            self.clear()

    def _remove_leftovers(self) -> None:
        # Exactly such names: a save to ``NAME.more`` may be under way.
        name = re.compile(rf"\.{re.escape(self.path.name)}\.[0-9a-f]{{16}}\.partial")
        for left in self.path.parent.iterdir():
            if name.fullmatch(left.name):
                _discard(left, self.path)
        if os.path.lexists(self.path):
            _discard(_old(self.path), self.path)


class SingleFile(LocalStore):
    """One file. The caller decides what it may replace."""

    def check_free(self, overwrite: bool) -> None:
        if not overwrite and os.path.lexists(self.path):
            raise FileExistsError(f"{self.path} exists. Choose another name")

    def _make_unfinished(self, path: Path) -> None:
        pass  # the caller creates the file

    def check_seen(self) -> None:
        pass  # only the process that creates it writes it

    def _take_name(self, written: Path) -> None:
        try:
            os.link(written, self.path)  # a rename would replace a file that has come in the meantime
        except OSError as error:
            if error.errno == errno.EEXIST or not written.exists():
                raise
            os.rename(written, self.path)  # there are file systems without links
        else:
            with contextlib.suppress(OSError):  # the file is in its place
                written.unlink()


def partial_folder(path: Path, attempt: str) -> Path:
    """The folder in which a save writes."""
    return path.parent / f".{path.name}.{attempt}.partial"


def remove_unfinished(parent: Path) -> None:
    """Remove what killed saves have left in a folder, as far as that is possible. No save may be under way there."""
    with contextlib.suppress(OSError):
        for left in parent.glob(".*.partial"):
            if left.is_dir():
                _discard(left, parent / "unfinished")


def _discard(left: Path, path: Path) -> None:
    """Remove what a save to ``path`` has left, as far as that is possible."""
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


def _old(path: Path) -> Path:
    return path.parent / f".{path.name}.old"


def _may_be(path: Path) -> bool:
    """Whether a path may be a checkpoint. Unfinished saves are hidden."""
    if path.name.startswith(".") or not path.is_dir():
        return False
    try:
        names = os.listdir(path)
    except OSError:
        return True
    return may_be_checkpoint(names)


def has_description(path: Path) -> bool:
    """Whether this is a folder with a file that describes a checkpoint, by us or by torch. It may be damaged."""
    return any((path / name).is_file() for name in (INDEX, METADATA))


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
