"""Writes to files of a run: a file is replaced whole, and a write that fails is one clear error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwright.common.durable import NEW, replace_file
from shardwright.common.json_text import strict_json
from shardwright.train.errors import UserError


@contextmanager
def writing(path: Path, key: str = "") -> Iterator[None]:
    """Raise a UserError if a write below `path` fails (full disk, read-only, no permission). It names the key by which
    the user has chosen the folder. Without one the folder is that of a run, which no resume can change."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{key}: " * bool(key) + unwritable(path, error, of_run=not key)) from error


def unwritable(path: Path | str, error: BaseException, of_run: bool = False) -> str:
    """Return the error in words, with advice. `of_run`: nobody can choose another folder, since a resume uses this
    one."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
    full = _is_any(error, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    denied = _is_any(error, errno.EACCES, errno.EPERM, errno.EROFS)
    if of_run:
        advice = "Free some space" if full else "Allow this user to write there" if denied else "Correct this"
        advice += "; a resumed run writes to the same folder"
    elif denied:
        advice = "Choose a folder in which you may write"
    else:
        advice = "Free some space, or choose another folder" if full else "Choose another folder"
    return f"{path}: cannot write: {reason}; earlier files are unchanged. {advice}"


_FOR_THE_USER = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR,
    errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP,
)  # fmt: skip


def may_pass(error: OSError) -> bool:
    """Return whether the same call may succeed later without a change by the user, as after EIO of a network disk."""
    kinds = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
    return not isinstance(error, kinds) and not _is_any(error, *_FOR_THE_USER)


def _is_any(error: BaseException, *numbers: int) -> bool:
    """Return whether a write failed for one of these reasons. An error of another rank has its reason as text alone."""
    if not isinstance(error, OSError):
        return False
    return error.errno in numbers or (
        error.errno is None and any(os.strerror(number) in str(error) for number in numbers)
    )


def write_text(path: Path, text: str) -> None:
    """Replace a file in the folder of a run, as :func:`replace_file`. Raises UserError if the write fails."""
    with writing(path):
        replace_file(path, text.encode())


def remove_unfinished(folder: Path) -> None:
    """Remove what processes have left here that were killed inside :func:`write_text`. Nobody else may write."""
    for temporary in folder.glob(f"*.??????{NEW}"):
        with suppress(OSError):
            temporary.unlink()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file in the folder of a run by strict JSON. Raises as :func:`write_text`."""
    write_text(path, strict_json(value, indent=2) + "\n")
