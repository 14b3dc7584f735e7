"""A checkpoint that stays the same while it is read: another job may give its name to a newer one at any moment.

A load compares digests first and reads after that, each time by the names of files. If another save replaces the folder
in between, the second half would come from the other checkpoint. So the files are opened before any value changes, and
the folder must then still be the one that was compared. What is open stays readable, also when the folder is deleted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shardwright.checkpoint.digests import Damaged, open_regular, read_regular

HELD = 256  #: files that a rank keeps open; systems allow a process 1,024 by default


class Origin(NamedTuple):
    """Which file described a checkpoint when it was opened."""

    file: Path
    identity: tuple[int, int, int]  #: device, inode and time of change: cheap to compare
    links: bool

    @classmethod
    def of(cls, file: Path, links: bool) -> Origin:
        found = os.stat(file)
        return cls(file, (found.st_dev, found.st_ino, found.st_mtime_ns), links)

    def is_replaced(self, fingerprint: str | None) -> bool:
        """Whether another file has its name now. Without a fingerprint of the content the identity decides."""
        try:
            if Origin.of(self.file, self.links).identity == self.identity:
                return False
            # Some file systems of other machines give a file another number whenever it is looked up.
            content = None if fingerprint is None else read_regular(self.file, self.links)
        except (OSError, Damaged):
            return True
        return content is None or hashlib.sha256(content).hexdigest() != fingerprint


@contextmanager
def unless_replaced(origin: Origin | None, fingerprint: str | None = None) -> Iterator[None]:
    """Raise an OSError, also in the place of Damaged, if the checkpoint was replaced before the end of the block."""
    try:
        yield
    except Damaged:
        if origin is not None and origin.is_replaced(fingerprint):
            raise replaced(origin.file.parent) from None
        raise
    if origin is not None and origin.is_replaced(fingerprint):
        raise replaced(origin.file.parent)


def replaced(folder: Path) -> OSError:
    return OSError(f"{folder}: another save has replaced the checkpoint while it was read. Load it again")


class OpenFiles:
    """The files of a folder that a rank reads. Close it after the last read.

    Args:
        folder: the checkpoint.
        links: whether files may be behind links.
    """

    def __init__(self, folder: Path, links: bool) -> None:
        self.folder, self.links = folder, links
        self._held: dict[str, int] = {}

    def hold(self, names: Iterable[str]) -> None:
        """Open the first ``HELD`` of these files. The others are opened when they are read."""
        for name in sorted(set(names) - set(self._held))[: HELD - len(self._held)]:
            self._held[name] = open_regular(self.folder / name, self.links)

    @contextmanager
    def descriptor(self, name: str) -> Iterator[int]:
        """For reads of a file."""
        held = self._held.get(name)
        if held is not None:
            yield held
            return
        descriptor = open_regular(self.folder / name, self.links)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def close(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])
