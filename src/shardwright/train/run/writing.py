"""Writes to files of a run: a file is replaced whole, and a write that fails is one clear error."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwright.strict_json import strict_json
from shardwright.train.errors import UserError

_NEW = ".new"


@contextmanager
def writing(path: Path, key: str = "") -> Iterator[None]:
    """Raise a UserError if a write below `path` fails (full disk, read-only, no permission). It names the key by which
    the user has chosen the folder. Without one the folder is that of a run, which no resume can change."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{key}: " * bool(key) + unwritable(path, error, of_run=not key)) from error


def unwritable(path: Path | str, error: BaseException, of_run: bool = False) -> str:
    """The error in words, with advice. `of_run`: nobody can choose another folder, since a resume uses this one."""
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


def replace_text(path: Path, text: str) -> None:
    """Replace the file at `path`. Readers see the old text or the new text, never a part, also after a power cut.

    Several processes may do so at the same time, as ranks whose job fails. The last one's text stays.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(3)}{_NEW}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())  # else a power cut may leave an empty file under the name
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """As `replace_text`, for a file in the folder of a run. Raises UserError if the write fails."""
    with writing(path):
        replace_text(path, text)


def remove_unfinished(folder: Path) -> None:
    """Remove what processes have left here that were killed inside :func:`replace_text`. Nobody else may write."""
    for temporary in folder.glob(f"*.??????{_NEW}"):
        with suppress(OSError):
            temporary.unlink()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, strict_json(value, indent=2) + "\n")
