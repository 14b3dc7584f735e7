"""Finds that another job has replaced a checkpoint while it is read. Its name may be given to a newer one at any time.

A load compares digests first and reads after that, each time by the names of files. If another save replaces a folder
in between, the second half would come from the other checkpoint. So the files are opened before any value changes, and
the folder must then still be the one that was compared. Open files stay readable, also when the folder is deleted.
Behind a URL the names of objects tell saves apart, so a load cannot mix two; it fails if its objects are deleted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from shardwright.checkpoint.storage.stores import Files, Reader
from shardwright.common.errors import Damaged

HELD = 256  #: files that a rank keeps open; systems allow a process 1,024 by default


class DescriptionFile(NamedTuple):
    """The file that described a checkpoint when it was opened."""

    files: Files
    name: str
    identity: Hashable | None  #: see :meth:`Files.identity`
    fingerprint: str | None = None  #: SHA-256 of its content, once that is read

    @classmethod
    def of(cls, files: Files, name: str) -> DescriptionFile:
        return cls(files, name, files.identity(name))

    def is_replaced(self) -> bool:
        """Return whether another file has its name now. Without a fingerprint the identity decides."""
        try:
            if self.identity is not None and self.files.identity(self.name) == self.identity:
                return False
            # Some file systems of other machines give a file another number whenever it is looked up.
            content = None if self.fingerprint is None else self.files.read(self.name)
        except Damaged:
            return True
        except OSError:
            return (
                self.identity is not None
            )  # else the store does not answer, which is no sign of another checkpoint
        if content is None:
            return self.identity is not None
        return hashlib.sha256(content).hexdigest() != self.fingerprint


@contextmanager
def unless_replaced(file: DescriptionFile, *, changing: bool = False) -> Iterator[None]:
    """Raise an OSError, also in the place of Damaged, if the checkpoint was replaced before the end of the block.

    With ``changing`` values may change in the block. Then only a failure counts: what is read is of the files that are
    open.
    """
    try:
        yield
    except Damaged:
        if file.is_replaced():
            raise _replaced(file, changing) from None
        raise
    if not changing and file.identity is not None and file.is_replaced():
        raise _replaced(file, changing)


def _replaced(file: DescriptionFile, changing: bool) -> OSError:
    what = ". Some values were read before that, and others were not" if changing else ""
    return OSError(
        f"{file.files}: another program has replaced or removed the checkpoint while it was read{what}. Load it "
        "again"
    )


class OpenFiles:
    """The files of a checkpoint that a rank reads. Close it after the last read."""

    def __init__(self, description_file: DescriptionFile) -> None:
        self._description_file = description_file
        self._held: dict[str, Reader] = {}

    def hold(self, names: Iterable[str]) -> None:
        """Open the first ``HELD`` of these files, and find that they are of the checkpoint that was compared. The
        others are opened when they are read."""
        with unless_replaced(self._description_file):
            for name in sorted(set(names) - set(self._held))[: HELD - len(self._held)]:
                self._held[name] = self._description_file.files.open(name)

    @contextmanager
    def reader(self, name: str) -> Iterator[Reader]:
        """A reader of a file, until the block ends.

        Raises:
            OSError: it is opened only now, and the checkpoint was replaced.
        """
        held, file = self._held.get(name), self._description_file
        with unless_replaced(file, changing=True):
            if held is not None:
                yield held
                return
            reader = file.files.open(name)
            try:
                if file.identity is not None and file.is_replaced():
                    raise _replaced(file, changing=True)
                yield reader
            finally:
                reader.close()

    def close(self) -> None:
        while self._held:
            self._held.popitem()[1].close()
