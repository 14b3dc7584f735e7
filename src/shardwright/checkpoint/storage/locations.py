"""The store behind a path or URL that a user passes, and the checkpoints there: listed, removed.

Nothing here reads what a checkpoint holds.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardwright.checkpoint.storage.local_store import LocalStore, has_description
from shardwright.checkpoint.storage.object_store import ObjectStore
from shardwright.checkpoint.storage.stores import Store

_LOCAL_URLS = ("file://", "local://")

Location = (
    str | os.PathLike[str] | Store
)  #: a folder, a URL such as ``s3://bucket/run-7/step-100``, or a store


def store_of(location: Location) -> Store:
    """Return the store of a checkpoint. No package is imported for a URL.

    Raises:
        TypeError: it is of another type.
        ValueError: a URL that names no place.
    """
    if isinstance(location, Store):
        return location
    if not isinstance(location, (str, os.PathLike)) or isinstance(os.fspath(location), bytes):
        raise TypeError(
            f"path: expected a string or a pathlib.Path, got {type(location).__name__} {location!r:.100}"
        )
    text = os.fspath(location)
    if "\0" in text:
        raise ValueError(f"path: {text!r} has a zero byte, which no file system takes")
    if not isinstance(location, str) and (found := re.match(r"[a-z][a-z0-9+.-]+:/(?!/)", text)):
        raise ValueError(
            f"{text} is a URL that pathlib has changed: it makes {found[0]} of {found[0]}/. Pass the URL as a string"
        )
    if "://" not in text:
        return LocalStore(Path(text))
    for prefix in _LOCAL_URLS:
        if text.startswith(prefix):
            return LocalStore(Path(text.removeprefix(prefix)))
    return ObjectStore(text)


def folder_or_url(location: Location) -> Path | str:
    """Return the folder of a location as a path, or its URL. ``file:///runs`` is a folder, too.

    Raises:
        ValueError: a URL that names no place.
    """
    store = store_of(location)
    return store.path or str(store)


# -- checkpoints at a location -----------------------------------------------------------------------------------------


def list_checkpoints(parent: str | os.PathLike[str], *, recover: bool = False) -> list[str]:
    """Return the names of what is in a folder or behind a URL and may be a checkpoint, whole or not, in no order.

    These are folders with a file of a checkpoint, and empty ones, whose files may be lost. Behind a URL all folders
    are, since a look into each would take a request.

    Args:
        parent: the folder or URL. It need not exist.
        recover: give a folder that was being replaced when a process ended its name back, where that is possible.

    Raises:
        OSError: the store behind a URL does not answer.
    """
    return store_of(parent).children(recover)


def is_checkpoint(path: Path) -> bool:
    """Return whether the folder of a checkpoint is there, which may be damaged.

    A folder that was being replaced when a process ended gets its name back before.
    """
    LocalStore(path).recover()
    return has_description(path)


def check_writable(parent: str | os.PathLike[str]) -> None:
    """Raise OSError if checkpoints cannot be written into a folder or behind a URL. Nothing stays there."""
    store_of(parent).check_writable()


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, whole or not, from a folder or a URL. A name that is gone holds no part of it.

    Behind a URL other objects stay.

    Raises:
        FileNotFoundError: nothing is in the place of the folder.
        FileExistsError: a folder without any file of a checkpoint, or a file that no checkpoint is. It stays.
        OSError: it cannot be removed.
    """
    store = store_of(path)
    store.check_removable()
    store.clear()


def remove_unfinished(parent: str | os.PathLike[str]) -> None:
    """Remove what killed saves have left in a folder. No save may be under way there. Behind a URL the next save to the
    same place removes it."""
    store_of(parent).remove_unfinished()


def replaces_checkpoints(parent: str | os.PathLike[str]) -> bool:
    """Return whether a save with ``overwrite`` below a folder or URL replaces a whole checkpoint of the same name."""
    return store_of(parent).replaces
