"""The folder of a saved model as a place: a save writes it under another name, and only a saved model is replaced."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Self

from shardwright.checkpoint.pretrained.files import SAFETENSORS_INDEX, FileTensor, abbreviated, open_stored
from shardwright.checkpoint.storage.local_store import LocalPlace, LocalSave
from shardwright.checkpoint.storage.locations import store_of
from shardwright.checkpoint.storage.stores import new_attempt


class ModelFolder(LocalPlace):
    """A folder with safetensors, an index and a ``config.json``."""

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Self:
        """Return the folder at a path, behind links if there are any.

        Raises ValueError for a URL of another machine.
        """
        place = store_of(path)
        if place.path is None:
            raise ValueError(f"{place}: models are written to folders of this machine, and read from them")
        return cls(place.path.resolve())

    def unfinished(self) -> LocalSave:
        return LocalSave(self, new_attempt())

    def check_free(self, overwrite: bool) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise FileExistsError(f"{self.path}: expected a folder, or none yet, found a file")
        if any(self.path.iterdir()) and not overwrite:
            raise FileExistsError(
                f"{self.path}: the folder exists and is not empty; pass another folder, or overwrite=True"
            )
        if others := _others(self.path):
            raise FileExistsError(
                f"{self.path}: overwrite=True replaces the whole folder, and the folder has other files than a saved "
                f"model: {abbreviated(others)}. Pass another folder."
            )

    def may_be_replaced(self, path: Path) -> bool:
        return path.is_dir() and not path.is_symlink() and not _others(path)


def open_model(path: str | os.PathLike[str]) -> dict[str, FileTensor]:
    """Return the tensors of files of weights, as :func:`open_stored`. A folder that was being replaced when a process
    ended gets its name back before.

    Raises:
        FileNotFoundError, ValueError: as :func:`open_stored`; or the path is a URL of another machine.
    """
    place = ModelFolder.at(path)
    with contextlib.suppress(OSError):  # of a file system that cannot be written
        place.recover()
    return open_stored(store_of(path).path or place.path)


def _others(folder: Path) -> list[str]:
    """Return the names in a folder that a saved model does not have."""
    names = sorted(each.name for each in folder.iterdir())
    return [
        name
        for name in names
        if not (name.endswith(".safetensors") or name in (SAFETENSORS_INDEX, "config.json"))
    ]
