"""Checkpoints in local folders. A folder or file gets its name when it is whole.

A save writes into ``.NAME.ATTEMPT.partial`` beside the place and renames it. What is replaced exchanges names with the
new one in one step where the system can do that. Elsewhere it is called ``.NAME.old`` for a moment, and
:meth:`LocalPlace.recover` gives it its name back after a crash in between. Nothing here communicates.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from shardwright.checkpoint.format.names import INDEX, METADATA, VALUES
from shardwright.checkpoint.storage.local_files import LocalFiles, LocalWriter
from shardwright.checkpoint.storage.save_names import may_be_checkpoint
from shardwright.checkpoint.storage.stores import Check, new_attempt, trust, unless_removed
from shardwright.common.durable import NEW, make_folder, named, sync_folder
from shardwright.common.errors import Damaged

_AT_FDCWD, _EXCHANGE = -100, 2


class LocalPlace(LocalFiles, ABC):
    """A path at which a save puts what it has written. A subclass says what may be there and be replaced."""

    @abstractmethod
    def check_free(self, overwrite: bool) -> None:
        """Raise FileExistsError if something is here that is not to be overwritten."""

    def may_be_replaced(self, path: Path) -> bool:
        """Return whether a checkpoint is at a path: a folder, or a file of ``torch.save``. A link is none."""
        return not path.is_symlink() and (
            has_description(path) or (path.is_file() and zipfile.is_zipfile(path))
        )

    def recover(self) -> None:
        """Finish what a crash has interrupted: give a folder that was being replaced its name back."""
        old = _old(self.path)
        if os.path.lexists(self.path) or not self.may_be_replaced(old):
            return
        try:
            os.rename(old, self.path)
        except OSError:
            if not os.path.lexists(self.path):  # another rank was not faster
                raise
        sync_folder(self.path.parent)

    def remove_leftovers(self) -> None:
        """Remove what killed saves to this place have left."""
        # Exactly such names: a save to ``NAME.more`` may be under way.
        name = re.compile(rf"\.{re.escape(self.path.name)}\.[0-9a-f]{{16}}\.partial")
        for left in self.path.parent.iterdir():
            if name.fullmatch(left.name):
                _discard(left, self.path)
        if os.path.lexists(self.path):
            _discard(_old(self.path), self.path)


class LocalStore(LocalPlace):
    """The folder of a checkpoint."""

    replaces = True

    # -- the checkpoint at this place ----------------------------------------------------------------------------------

    def description_name(self) -> str:
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
            return f"there is no checkpoint{self._near()}"
        if self.path.is_file() and zipfile.is_zipfile(self.path):
            return (
                "this is a file of torch.save, such as Fabric's full checkpoints, and not the folder of a checkpoint. "
                "Read it with torch.load or fabric.load"
            )
        return "this is a file, and not the folder of a checkpoint"

    def _near(self) -> str:
        """Return a checkpoint beside a missing one, or the folder in which a relative path was looked for."""
        folder = self.path.parent
        names = sorted(os.listdir(folder), key=lambda name: (len(name), name)) if folder.is_dir() else []
        beside = next((name for name in reversed(names) if has_description(folder / name)), None)
        if beside is not None:
            return f"; beside it is {folder / beside}"
        return "" if self.path.is_absolute() else f" in the working folder {Path.cwd()}"

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

    def check_removable(self) -> None:
        path = self.path
        if not os.path.lexists(path):
            raise FileNotFoundError(f"{path}: expected a checkpoint, found nothing")
        if path.is_dir() and not path.is_symlink():
            names = sorted(os.listdir(path))
            if not may_be_checkpoint(names):
                inside = "" if len(names) == 1 else f" and {len(names) - 1} more"
                raise FileExistsError(
                    f"{path}: expected a checkpoint, found a folder with {names[0]}{inside}; it stays. Remove it by "
                    "hand"
                )
        elif path.is_file() and not path.is_symlink() and not zipfile.is_zipfile(path):
            raise FileExistsError(
                f"{path}: expected a checkpoint, found another file; it stays. Remove it by hand"
            )

    def clear(self) -> None:
        """Also remove a link or a file, and nothing if nothing is there."""
        doomed = self.path
        if doomed.is_dir() and not doomed.is_symlink():
            # Renamed first, so that a half-removed checkpoint is never under a checkpoint's name, also after a crash.
            doomed = partial_folder(self.path, new_attempt())
            os.rename(self.path, doomed)
            sync_folder(self.path.parent)
        _remove(doomed)

    # -- a save to this place ------------------------------------------------------------------------------------------

    def files(self, links: bool) -> LocalFiles:
        return LocalFiles(self.path, links)

    def unfinished(self, attempt: str | None = None) -> LocalSave:
        return LocalSave(self, attempt or new_attempt())

    def check_free(self, overwrite: bool) -> None:
        path = self.path
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            if not overwrite:
                raise FileExistsError(f"{path} exists. Choose another path, or pass overwrite=True")
            if not self.may_be_replaced(path):
                kind = "a link" if path.is_symlink() else "no checkpoint"
                raise FileExistsError(f"{path} is {kind}, so it is not overwritten. Choose another path")

    # -- the parent of such places -------------------------------------------------------------------------------------

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

    def remove_unfinished(self) -> None:
        """Remove what killed saves have left here, as far as that is possible."""
        with contextlib.suppress(OSError):
            for left in self.path.glob(".*.partial"):
                if left.is_dir():
                    _discard(left, self.path / "unfinished")


# -- a save ------------------------------------------------------------------------------------------------------------


class LocalPartial:
    """A folder or file beside a local place, at ``path``. The commit gives it the name of the place."""

    def __init__(self, store: LocalPlace, attempt: str) -> None:
        self.path, self.store = partial_folder(store.path, attempt), store

    def begin(self, nbytes: int, overwrite: bool, check: Check = trust) -> None:
        place = self.store.path
        self.store.recover()
        self.store.check_free(overwrite)
        make_folder(place.parent)
        free = shutil.disk_usage(place.parent).free
        if free < nbytes:
            reason = f"{os.strerror(errno.ENOSPC)}: the checkpoint needs {nbytes:,} bytes, {free:,} are free"
            raise OSError(errno.ENOSPC, reason, str(place))

    def check_seen(self) -> None:
        """Nothing: the process that has begun it writes it."""

    def commit(self, overwrite: bool) -> None:
        """Give a written folder or file its name. The earlier owner of the name is deleted after that."""
        self.store.check_free(overwrite)
        with unless_removed(self):
            self._give_name(overwrite)
        with contextlib.suppress(OSError):  # the checkpoint is in its place
            self.store.remove_leftovers()

    def abandon(self, names: Iterable[str]) -> None:
        with contextlib.suppress(OSError):
            _remove(self.path)

    def is_removed(self) -> bool:
        return not self.path.exists()

    def _give_name(self, overwrite: bool) -> None:
        if self.path.is_dir():
            sync_folder(self.path)
        identity = os.stat(self.path)
        try:
            replaced = self._put_in_place(overwrite)
            sync_folder(self.path.parent)
        except BaseException:
            self._take_back(identity)
            raise
        if replaced is not None:
            with contextlib.suppress(OSError):
                if (
                    replaced != self.path
                ):  # no half-removed folder is called old, which recover would bring back
                    os.rename(replaced, self.path)
                _remove(self.path)

    def _put_in_place(self, overwrite: bool) -> Path | None:
        """Rename the folder or file. Returns where the replaced one is now, if there was one."""
        place = self.store.path
        if not overwrite or not os.path.lexists(place):
            try:
                self._take_name()
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                raise FileExistsError(
                    f"{place}: another save has just written it. Choose another path"
                ) from None
            return None
        if _exchange(self.path, place):
            return self.path
        old = _old(place)
        _remove(old)
        os.rename(place, old)
        os.rename(self.path, place)
        return old

    def _take_name(self) -> None:
        os.rename(self.path, self.store.path)  # no folder takes the name of one that has content

    def _take_back(self, identity: os.stat_result) -> None:
        """Give the names back that a failed commit may have changed, as far as that is possible."""
        written, place = self.path, self.store.path
        with contextlib.suppress(OSError):
            if os.path.lexists(place) and os.path.samestat(os.lstat(place), identity):
                if not os.path.lexists(written):
                    os.rename(place, written)
                else:
                    _exchange(written, place)
        with contextlib.suppress(OSError):
            if not os.path.lexists(place) and os.path.lexists(_old(place)):
                os.rename(_old(place), place)
        try:
            sync_folder(place.parent)
        except OSError:
            # Until the names are on disk, a crash could give the checkpoint's name to what a failed save removes. So it
            # is not removed: it gets another name, and the next save that works removes it.
            with contextlib.suppress(OSError):
                os.rename(written, partial_folder(place, new_attempt()))


class LocalSave(LocalPartial, LocalFiles):
    """The folder in which the ranks of a save to a local place write."""

    def __init__(self, store: LocalPlace, attempt: str) -> None:
        LocalPartial.__init__(self, store, attempt)
        LocalFiles.__init__(self, self.path)

    def begin(self, nbytes: int, overwrite: bool, check: Check = trust) -> None:
        super().begin(nbytes, overwrite, check)
        self.path.mkdir()

    def check_seen(self) -> None:
        if not self.path.is_dir():
            raise OSError(
                f"{self.path} is not there, though the first rank has made it: all ranks must save to a file system "
                "that they share"
            )

    def stored_name(self, name: str) -> str:
        return name

    def create(self, name: str) -> LocalWriter:
        return LocalWriter(self.path / name)

    def write(self, name: str, content: bytes) -> None:
        unfinished = f"{name}{NEW}"
        with named(self.path / name):
            writer = self.create(unfinished)
            try:
                writer.write(content, 0)
                writer.finish()
            except BaseException:
                writer.discard()
                raise
            os.rename(self.path / unfinished, self.path / name)  # on disk when the commit syncs the folder

    def remove(self, name: str) -> None:
        (self.path / name).unlink()

    def sizes(self) -> dict[str, int]:
        found = {}
        with os.scandir(self.path) as entries:  # unlike a look at one name, never answered from an old cache
            for each in entries:
                with contextlib.suppress(FileNotFoundError):  # it has just got another name
                    found[each.name] = each.stat().st_size
        return found


# -- one file ----------------------------------------------------------------------------------------------------------


class SingleFile(LocalPlace):
    """The place of one file. The caller decides what it may replace."""

    def unfinished(self) -> SingleFileSave:
        return SingleFileSave(self, new_attempt())

    def check_free(self, overwrite: bool) -> None:
        if not overwrite and os.path.lexists(self.path):
            raise FileExistsError(f"{self.path} exists. Choose another name")


class SingleFileSave(LocalPartial):
    """The file before it has its name, at ``path``. One process creates and writes it."""

    def _take_name(self) -> None:
        written, place = self.path, self.store.path
        try:
            os.link(written, place)  # a rename would replace a file that has come in the meantime
        except OSError as error:
            if error.errno == errno.EEXIST or not written.exists():
                raise
            os.rename(written, place)  # there are file systems without links
        else:
            with contextlib.suppress(OSError):  # the file is in its place
                written.unlink()


# -- names beside a place ----------------------------------------------------------------------------------------------


def partial_folder(path: Path, attempt: str) -> Path:
    """Return the folder in which a save to a path writes."""
    return path.parent / f".{path.name}.{attempt}.partial"


def _old(path: Path) -> Path:
    """Return the name of what a save to a path replaces, for a moment."""
    return path.parent / f".{path.name}.old"


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


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, or nothing if nothing is there. Raises OSError."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


# -- what is at a path -------------------------------------------------------------------------------------------------


def _may_be(path: Path) -> bool:
    """Return whether a path may be a checkpoint. Unfinished saves are hidden."""
    if path.name.startswith(".") or not path.is_dir():
        return False
    try:
        names = os.listdir(path)
    except OSError:
        return True
    return may_be_checkpoint(names)


def has_description(path: Path) -> bool:
    """Return whether this is a folder with a file that describes a checkpoint, by us or by torch. It may be damaged."""
    return any((path / name).is_file() for name in (INDEX, METADATA))
