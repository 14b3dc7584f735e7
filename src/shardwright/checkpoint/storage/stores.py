"""Files of a checkpoint: what a save and a load need of them, and files in a local folder.

:class:`Files` are in a folder here, or objects behind a URL (`objects`). A :class:`Store` is a place that holds one
checkpoint, whole or none. Nothing here communicates, and nothing here knows what the files hold.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from shardwright.checkpoint.format.digests import open_regular, read_regular, size_of
from shardwright.errors import Damaged


class Writer(Protocol):
    """A file that is being written. Either :meth:`finish` or :meth:`discard` ends it."""

    in_order: bool  #: each piece must follow the one before; else several threads may write anywhere

    def write(self, piece: bytes | memoryview, position: int) -> None:
        """Write at a position. Raises OSError with the file and the reason."""

    def finish(self) -> None:
        """Return when the file is durable. Raises OSError with the file and the reason."""

    def discard(self) -> None:
        """Give up after a failure. Never raises."""


class Reader(Protocol):
    """A file that is open for reading."""

    at_once: int  #: bytes that one call should ask for at most

    def read_into(self, target: memoryview, position: int) -> int:
        """Read bytes from ``position`` on, at least one; return how many.

        Raises:
            Damaged: the file ends before ``position``, or cannot be read.
            OSError: the store does not answer.
        """

    def close(self) -> None: ...


class Files(Protocol):
    """The files of one checkpoint. ``str()`` of it is a path or a URL, for messages."""

    @property
    def path(self) -> Path | None:
        """The folder, in a file system of this machine; None if the place is no such folder."""

    def stored_name(self, name: str) -> str:
        """The name under which a file of a save is stored: other saves to the same place never write it."""

    def create(self, name: str) -> Writer:
        """Begin a file, under exactly this name. Raises OSError; FileExistsError if it is there."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, under exactly this name. Raises as :meth:`create` and the writer do."""

    def remove(self, name: str) -> None:
        """Remove a file. Raises OSError."""

    def size(self, name: str) -> int:
        """Bytes of a file. Raises Damaged if it is missing or no file; OSError if the store does not answer."""

    def read(self, name: str) -> bytes:
        """All of a small file. Raises as :meth:`size`."""

    def open(self, name: str) -> Reader:
        """Open a file for reading. Raises as :meth:`size`."""

    def identity(self, name: str) -> Hashable | None:
        """A value that changes when another file gets this name; None where two saves never use the same name.

        Raises OSError.
        """

    def drop_from_cache(self, name: str) -> None:
        """Let the next read of a file come from the store itself, as far as that is possible."""


@runtime_checkable
class Store(Files, Protocol):
    """A place that holds one checkpoint, whole or none, or the parent of such places."""

    def address(self) -> str:
        """A path or URL of which :func:`store_of` makes this store again, also in another process of this machine."""

    def children(self, recovers: bool) -> list[str]:
        """The names of what is here and may be a checkpoint, whole or not, in no order.

        If it ``recovers``, a checkpoint that was being replaced when a process ended gets its name back, where that is
        possible. Raises OSError if the store does not answer.
        """

    def check_writable(self) -> None:
        """Raise OSError if checkpoints cannot be written below this place. Nothing stays there."""

    def clear(self) -> None:
        """Remove the checkpoint, whole or not. A name that is gone has no part of it. Raises OSError."""

    def description(self) -> str:
        """The name of the file that describes the checkpoint.

        Raises:
            FileNotFoundError, Damaged: there is no whole checkpoint.
            OSError: the store does not answer.
        """

    def begin(self, attempt: str, nbytes: int, overwrite: bool) -> None:
        """Prepare a save of ``nbytes``; ``attempt`` is its identity.

        Raises:
            FileExistsError: something is there that is not to be overwritten.
            OSError: the place cannot be written, or has too little room.
        """

    def unfinished(self, attempt: str) -> Self:
        """The store into which the save writes. It can be read before it is committed."""

    def check_free(self, overwrite: bool) -> None:
        """Raise FileExistsError if something has appeared here, after :meth:`begin`, that is not to be overwritten."""

    def leave(self, name: str, content: bytes) -> None:
        """Write a small file that appears when it is complete. It need not be durable. Raises OSError."""

    def sizes(self) -> dict[str, int]:
        """The bytes of the files that are here, by name. A file may be missing until it is complete. Raises OSError."""

    def check_seen(self) -> None:
        """Raise OSError if this process does not see the unfinished save that another one has begun."""

    def commit(self, unfinished: Store, overwrite: bool) -> None:
        """Make a written save the checkpoint of this place, in one step. Raises OSError; then nothing has changed.

        Without ``overwrite`` it is a FileExistsError if another save has just done it.
        """

    def is_removed(self) -> bool:
        """Whether this unfinished save is not there any more. Another save to the same place may remove it."""

    def abandon(self, names: Iterable[str]) -> None:
        """Remove this unfinished save, as far as that is possible. ``names`` are files that it may have."""

    def remove_leftovers(self, attempt: str) -> None:
        """Remove what killed saves to this place have left, except for ``attempt``'s."""


def new_attempt() -> str:
    """The identity of one save: no two saves have the same."""
    return uuid.uuid4().hex[:16]


# -- a local folder ----------------------------------------------------------------------------------------------------


class LocalFiles:
    """Files in a folder. Links are not followed, unless ``links``."""

    def __init__(self, path: Path, links: bool = False) -> None:
        self.path, self._links = path, links

    def __str__(self) -> str:
        return str(self.path)

    def stored_name(self, name: str) -> str:
        return name

    def create(self, name: str) -> LocalWriter:
        return LocalWriter(self.path / name)

    def write(self, name: str, content: bytes) -> None:
        writer = self.create(name)
        try:
            writer.write(content, 0)
            writer.finish()
        except BaseException:
            writer.discard()
            raise

    def remove(self, name: str) -> None:
        (self.path / name).unlink()

    def size(self, name: str) -> int:
        return size_of(self.path / name, self._links)

    def read(self, name: str) -> bytes:
        return read_regular(self.path / name, self._links)

    def open(self, name: str) -> LocalReader:
        return LocalReader(self.path / name, self._links)

    def identity(self, name: str) -> Hashable:
        found = os.stat(self.path / name)
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def drop_from_cache(self, name: str) -> None:
        path = self.path / name
        if not hasattr(os, "posix_fadvise") or not path.exists():
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class LocalWriter:
    """A new file, on disk (fsync) when it is finished."""

    in_order = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, piece: bytes | memoryview, position: int) -> None:
        rest = memoryview(piece)
        while rest:  # one call writes 2 GiB at most
            try:
                count = os.pwrite(self._descriptor, rest[: 1 << 30], position)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            rest, position = rest[count:], position + count

    def finish(self) -> None:
        sync(self._descriptor, self._path)
        os.close(self._descriptor)

    def discard(self) -> None:
        try:
            os.close(self._descriptor)
        except OSError:  # it may be closed, and the failure that came before it is the one to raise
            pass


class LocalReader:
    """A file by its descriptor. Raises Damaged as :func:`open_regular` does."""

    at_once = 1 << 20  # small, so that it stays in the processor's cache

    def __init__(self, path: Path, links: bool = False) -> None:
        self._path, self._descriptor = path, open_regular(path, links)

    def read_into(self, target: memoryview, position: int) -> int:
        try:
            count = os.preadv(self._descriptor, [target], position)
        except OSError as error:
            raise Damaged(f"{self._path.name} cannot be read: {error.strerror}") from None
        if not count:
            raise Damaged(f"{self._path.name} ends at byte {position:,}")
        return count

    def close(self) -> None:
        os.close(self._descriptor)


def sync(descriptor: int, path: Path) -> None:
    """Wait until a file is on disk. A failure names the file."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor, folder)
    finally:
        os.close(descriptor)
