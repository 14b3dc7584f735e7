"""Regular files of a folder that another program may have changed: no pipe, and no link that somebody has put there.

What is wrong with a file is raised as :class:`Damaged`, which names the file without its folder.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shardwright.common.errors import Damaged


def open_regular(file: Path, links: bool = False) -> int:
    """Open a file for reading, and return its descriptor, which the caller closes. ``links``: follow links.

    Raises:
        Damaged: there is no such file, or it is a link, a folder, a device or a pipe, which no save writes.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)  # so that pipes do not block
    try:
        descriptor = os.open(file, flags)
    except FileNotFoundError:
        raise Damaged(f"no {file.name} file") from None
    except OSError as error:
        is_link = not links and file.is_symlink()
        problem = (
            "is a symbolic link; a save writes only regular files"
            if is_link
            else f"cannot be read: {error.strerror}"
        )
        raise Damaged(f"{file.name} {problem}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{file.name} is not a regular file")
    return descriptor


def size_of(file: Path, links: bool = False) -> int:
    """Return the bytes of a file. Raises Damaged as :func:`open_regular` does."""
    descriptor = open_regular(file, links)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def read_regular(file: Path, links: bool = False) -> bytes:
    """Return the content of a small file. Raises Damaged as :func:`open_regular` does, or if it cannot be read."""
    with os.fdopen(open_regular(file, links), "rb") as stream:
        try:
            return stream.read()
        except OSError as error:
            raise Damaged(f"{file.name} cannot be read: {error.strerror}") from None
        except MemoryError:
            raise Damaged(f"{file.name} is larger than the memory that is left") from None
