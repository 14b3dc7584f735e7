"""The protocols of stores: places of checkpoints, saves to them, and the files of both.

A :class:`Store` is a place that holds one checkpoint, whole or none. An :class:`UnfinishedSave` is a save to it that is
under way. Both exist for local folders (`local_store`) and for objects behind a URL (`object_store`). Nothing here
communicates, and nothing here knows what the files hold.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from shardwright.common.errors import Damaged

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
    """Files to read, of a store or of an unfinished save. ``str()`` of it is a path or a URL."""

    @property
    def path(self) -> Path | None:
        """The folder, in a file system of this machine; None if the files are in no such folder."""

    @property
    def is_local(self) -> bool:
        """Whether a look at them costs nothing, and shows at once what another process writes: they are in a folder."""

    def size(self, name: str) -> int:
        """Return the bytes of a file. Raises Damaged if it is missing or no file; OSError if the store does
        not answer."""

    def read(self, name: str) -> bytes:
        """Return all of a small file. Raises as :meth:`size`."""

    def open(self, name: str) -> Reader:
        """Open a file for reading. Raises as :meth:`size`."""

    def identity(self, name: str) -> Hashable | None:
        """Return a value that changes when another file gets this name; None where two saves never use the same name.

        Raises OSError if the file is missing.
        """

    def drop_from_cache(self, name: str) -> None:
        """Let the next read of a file come from where it is stored, as far as that is possible."""


#: Raises Damaged if the checkpoint of a store is not whole.
Check: TypeAlias = "Callable[[Store], object]"


def trust(store: Store) -> None:
    """The check that takes every checkpoint for whole."""


@runtime_checkable
class Store(Files, Protocol):
    """A place that holds one checkpoint, whole or none, or the parent of such places.

    ``str()`` of it is the path or URL from which another process makes the same store.
    """

    @property
    def replaces(self) -> bool:
        """Whether a save with ``overwrite`` replaces a whole checkpoint."""

    def description_name(self) -> str:
        """Return the name of the file that describes the checkpoint.

        Raises:
            FileNotFoundError, Damaged: there is no whole checkpoint.
            OSError: the store does not answer.
        """

    def files(self, links: bool) -> Files:
        """Its files, to read. In a local folder `links` are followed."""

    def unfinished(self, attempt: str | None = None) -> UnfinishedSave:
        """Return the save to this place that has this identity; by default a new one. Nothing is written yet."""

    def check_removable(self) -> None:
        """Raise FileNotFoundError or FileExistsError if no checkpoint is here, as far as a look costs nothing."""

    def clear(self) -> None:
        """Remove the checkpoint, whole or not. A name that is gone has no part of it. Raises OSError."""

    def children(self, recovers: bool) -> list[str]:
        """Return the names of what is here and may be a checkpoint, whole or not, in no order.

        If it ``recovers``, a checkpoint that was being replaced when a process ended gets its name back, where that is
        possible. Raises OSError if the store does not answer.
        """

    def check_writable(self) -> None:
        """Raise OSError if checkpoints cannot be written below this place. Nothing stays there."""

    def remove_unfinished(self) -> None:
        """Remove what killed saves have left below this place, unless the next save to the same place does so. No save
        may be under way there."""


class Publication(Protocol):
    """Something that gets its name when it is whole: begun by one process, and then committed or abandoned by one."""

    @property
    def store(self) -> Files:
        """The place whose content it becomes."""

    def begin(self, nbytes: int, overwrite: bool, check: Check = trust) -> None:
        """Prepare for files of ``nbytes``. Behind a URL a checkpoint is overwritten only if ``check`` finds it damaged.

        Raises:
            FileExistsError: something is at the place that is not to be overwritten.
            OSError: the place cannot be written, or has too little room.
        """

    def check_seen(self) -> None:
        """Raise OSError if this process does not see the save that another one has begun."""

    def commit(self, overwrite: bool) -> None:
        """Make what was written the checkpoint of the place, in one step. Then remove what killed saves have left.

        Raises:
            FileExistsError: something has come there since :meth:`begin` that is not to be overwritten.
            OSError: it cannot be done, and nothing has changed.
        """

    def abandon(self, names: Iterable[str]) -> None:
        """Remove what was written, as far as that is possible. ``names`` are files that it may have."""

    def is_removed(self) -> bool:
        """Return whether it is not there any more. Another save to the same place may remove it."""


class UnfinishedSave(Publication, Files, Protocol):
    """A save to a store, whose files several processes write."""

    def stored_name(self, name: str) -> str:
        """Return the name under which a file is stored: no other save to the same place writes it."""

    def create(self, name: str) -> Writer:
        """Begin a file, under exactly this name. Raises OSError; FileExistsError if it is there."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, under exactly this name. It appears when it is complete. Raises OSError."""

    def remove(self, name: str) -> None:
        """Remove a file. Raises OSError."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the files that are here, by name.

        A file may be missing until it is complete. Raises OSError.
        """


@contextmanager
def unless_removed(save: Publication) -> Iterator[None]:
    """Raise an OSError that explains it if the block fails because another save has removed what this one writes."""
    try:
        yield
    except (OSError, Damaged) as error:
        if getattr(error, "errno", None) not in _MISSING or not save.is_removed():
            raise
        raise OSError(
            f"{save.store}: what this save had written was removed, by another program that saves to the same path or "
            "deletes files there. Let one program at a time save to a path"
        ) from error


def new_attempt() -> str:
    """Return the identity of one save: no two saves have the same."""
    return uuid.uuid4().hex[:16]
