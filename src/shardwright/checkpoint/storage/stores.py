"""Files of a checkpoint: what a save and a load need of them, and files in a local folder.

:class:`Files` are in a folder here, or objects behind a URL (`objects`). A :class:`Store` is a place that holds one
checkpoint, whole or none. Nothing here communicates, and nothing here knows what the files hold.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from shardwright.checkpoint.format.digests import open_regular, read_regular, size_of
from shardwright.durable import NEW, named, sync
from shardwright.errors import Damaged

_MISSING = (None, errno.ENOENT, errno.ESTALE)  #: of errors for files that are gone; None: an error of ours


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
        """Write a small file, under exactly this name. It appears when it is complete. Raises OSError."""

    def remove(self, name: str) -> None:
        """Remove a file. Raises OSError."""

    def size(self, name: str) -> int:
        """Bytes of a file. Raises Damaged if it is missing or no file; OSError if the store does not answer."""

    def read(self, name: str) -> bytes:
        """All of a small file. Raises as :meth:`size`."""

    def open(self, name: str) -> Reader:
        """Open a file for reading. Raises as :meth:`size`."""


@runtime_checkable
class Store(Files, Protocol):
    """A place that holds one checkpoint, whole or none, or the parent of such places.

    A save is made in three steps: :meth:`begin`, writes into the :meth:`unfinished` store, :meth:`commit`.
    """

    # -- a place, or the parent of places --

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

    # -- a save to this place --

    def begin(self, attempt: str, nbytes: int, overwrite: bool) -> None:
        """Prepare a save of ``nbytes``; ``attempt`` is its identity.

        Raises:
            FileExistsError: something is there that is not to be overwritten.
            OSError: the place cannot be written, or has too little room.
        """

    def unfinished(self, attempt: str) -> Self:
        """The store into which the save writes. It can be read before it is committed."""

    def commit(self, unfinished: Store, overwrite: bool) -> None:
        """Make a written save the checkpoint of this place, in one step. Then remove what killed saves have left.

        Raises:
            FileExistsError: something has come here since :meth:`begin` that is not to be overwritten.
            OSError: it cannot be done, and nothing has changed.
        """

    # -- of an unfinished save --

    def sizes(self) -> dict[str, int]:
        """The bytes of the files that are here, by name. A file may be missing until it is complete. Raises OSError."""

    def check_seen(self) -> None:
        """Raise OSError if this process does not see the unfinished save that another one has begun."""

    def is_removed(self) -> bool:
        """Whether this unfinished save is not there any more. Another save to the same place may remove it."""

    def abandon(self, names: Iterable[str]) -> None:
        """Remove this unfinished save, as far as that is possible. ``names`` are files that it may have."""


@contextmanager
def unless_removed(place: Store, unfinished: Store) -> Iterator[None]:
    """Raise an OSError that explains it if the block fails because another save has removed what this one writes."""
    try:
        yield
    except (OSError, Damaged) as error:
        if getattr(error, "errno", None) not in _MISSING or not unfinished.is_removed():
            raise
        raise OSError(
            f"{place}: what this save had written was removed, by another program that saves to the same path or "
            "deletes files there. Let one program at a time save to a path"
        ) from error


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
        unfinished = f"{name}{NEW}"
        with named(self.path / name):
            writer = self.create(unfinished)
            try:
                writer.write(content, 0)
                writer.finish()
            except BaseException:
                writer.discard()
                raise
            os.rename(self.path / unfinished, self.path / name)  # on disk when a commit syncs the folder

    def remove(self, name: str) -> None:
        (self.path / name).unlink()

    def size(self, name: str) -> int:
        return size_of(self.path / name, self._links)

    def read(self, name: str) -> bytes:
        return read_regular(self.path / name, self._links)

    def open(self, name: str) -> LocalReader:
        return LocalReader(self.path / name, self._links)


class LocalWriter:
    """A new file, on disk (fsync) when it is finished."""

    in_order = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, piece: bytes | memoryview, position: int) -> None:
        rest = memoryview(piece)
        while rest:  # one call writes 2 GiB at most
            with named(self._path):
                count = os.pwrite(self._descriptor, rest[: 1 << 30], position)
            rest, position = rest[count:], position + count

    def finish(self) -> None:
        sync(self._descriptor, self._path)
        with named(self._path):
            self._close()

    def discard(self) -> None:
        with suppress(OSError):  # the failure that came before it is the one to raise
            self._close()

    def _close(self) -> None:
        """Close the file once: its number is free also if that fails, and another thread may have it at once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


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
