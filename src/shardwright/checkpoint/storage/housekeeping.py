"""Checkpoints as things in a folder or behind a URL: which ones there are, and the removal of one.

For programs that keep checkpoints, such as the trainer. Nothing here reads what a checkpoint holds.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.checkpoint.storage.local_store import LocalStore, has_description
from shardwright.checkpoint.storage.locations import store_of


def list_checkpoints(parent: str | os.PathLike[str], *, recover: bool = False) -> list[str]:
    """The names of what is in a folder or behind a URL and may be a checkpoint, whole or not, in no order.

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
    """Whether the folder of a checkpoint is there, which may be damaged. One that was being replaced when a process
    ended gets its name back before."""
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
    """Whether a save with ``overwrite`` below a folder or URL replaces a whole checkpoint of the same name."""
    return store_of(parent).replaces
