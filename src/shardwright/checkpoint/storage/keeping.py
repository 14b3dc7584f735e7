"""The checkpoints of one parent folder or URL: which there are, and the removal of one. Nothing here reads them."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.checkpoint.storage import places
from shardwright.checkpoint.storage.objects import ObjectStore, promptly


def list_checkpoints(parent: str | os.PathLike[str], *, recover: bool = False) -> list[str]:
    """The names of what is in a folder or behind a URL and may be a checkpoint, whole or not, in no order.

    Args:
        parent: the folder or URL. It need not exist.
        recover: give a folder that was being replaced when a process ended its name back, where that is possible.

    Raises:
        OSError: the store behind a URL does not answer.
    """
    if "://" in str(parent):
        return list(promptly(ObjectStore(str(parent)).sizes, str(parent)))
    folder = Path(parent)
    for old in folder.glob(".*.old") if recover else ():
        try:
            places.recover(folder / old.name.removeprefix(".").removesuffix(".old"))
        except OSError:  # of a file system that cannot be written; then the name is not there
            pass
    return [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, whole or not, from a folder or a URL. A name that is gone holds no part of it.

    Raises:
        OSError: it cannot be removed.
    """
    if "://" in str(path):
        ObjectStore(str(path)).clear()
    else:
        places.remove(Path(path))
