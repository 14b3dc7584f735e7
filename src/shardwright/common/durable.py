"""Files that are on disk when a call returns, so that neither a crash nor a power cut loses them.

A new file is written and synced under a name that nobody reads. Then it is renamed, and its folder is synced: a reader
sees the old content or the new, never a part. Nothing here knows what the files hold.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

NEW = ".new"  #: the end of the names of files that :func:`replace_file` has not finished


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Let the system's errors name this file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync(descriptor: int, path: Path) -> None:
    """Wait until a file is on disk. A failure names the file."""
    with named(path):
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor, folder)
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Wait until the files in a folder, and their names, are on disk."""
    for path in folder.iterdir():
        with open(path, "rb") as stream:
            sync(stream.fileno(), path)
    sync_folder(folder)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that a crash does not lose their names."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file, open for writing in binary mode. Its content is on disk after the block, its name perhaps not yet."""
    with open(path, "xb") as stream:
        yield stream
        stream.flush()
        sync(stream.fileno(), path)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file, also over another one. Several processes may do so at once; the last one's content stays.

    Raises:
        OSError: it cannot be written. What was there is unchanged, unless only the sync of the folder has failed.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(3)}{NEW}")
    try:
        with named(path):
            with new_file(unfinished) as stream:
                stream.write(content)
            os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    sync_folder(path.parent)
