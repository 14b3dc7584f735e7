"""Checkpoints as things in a folder or behind a URL: which ones there are, and the removal of one.

For programs that keep checkpoints, such as the trainer. Nothing here reads what a checkpoint holds.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from shardwright.checkpoint.storage import local_store
from shardwright.checkpoint.storage.locations import store_of
from shardwright.checkpoint.storage.save_names import may_be_checkpoint


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
    local_store.LocalStore(path).recover()
    return local_store.has_description(path)


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
    if store.path is not None:
        _check_removable(store.path)
    store.clear()


def remove_unfinished(parent: str | os.PathLike[str]) -> None:
    """Remove what killed saves have left in a folder. No save may be under way there. Behind a URL the next save to the
    same place removes it."""
    folder = store_of(parent).path
    if folder is not None:
        local_store.remove_unfinished(folder)


def _check_removable(path: Path) -> None:
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{path}: expected a checkpoint, found nothing")
    if path.is_dir() and not path.is_symlink():
        names = sorted(os.listdir(path))
        if not may_be_checkpoint(names):
            inside = "" if len(names) == 1 else f" and {len(names) - 1} more"
            raise FileExistsError(
                f"{path}: expected a checkpoint, found a folder with {names[0]}{inside}; it stays. Remove it by hand"
            )
    elif path.is_file() and not path.is_symlink() and not zipfile.is_zipfile(path):
        raise FileExistsError(
            f"{path}: expected a checkpoint, found another file; it stays. Remove it by hand"
        )
