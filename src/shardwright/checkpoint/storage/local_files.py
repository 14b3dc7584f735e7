"""Files in a folder of this machine: read and written by descriptors, on disk when a write is finished.

Only regular files are opened. Nothing here knows checkpoints or saves: `local_store` does.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

from shardwright.common.durable import named, sync
from shardwright.common.errors import Damaged
from shardwright.common.regular_files import open_regular, read_regular, size_of


class LocalFiles:
    """Files in a folder, to read. Links are not followed, unless ``links``."""

    is_local = True

    def __init__(self, path: Path, links: bool = False) -> None:
        self.path, self._links = path, links

    def __str__(self) -> str:
        return str(self.path)

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
        if not hasattr(os, "posix_fadvise"):
            return
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
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
