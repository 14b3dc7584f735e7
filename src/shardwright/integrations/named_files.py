"""Files of checkpoints of named states: one file by ``torch.save``, and folders of other writers than ours.

A file is written beside its place and renamed, with the functions that give folders of checkpoints their names, since
either kind may replace the other. Reading runs no code of a file. Folders with ``meta.pt`` are by Lightning's own
strategies.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint import Damaged
from shardwright.checkpoint.dcp.folders import not_plain
from shardwright.checkpoint.format.digests import open_regular
from shardwright.checkpoint.format.index import INDEX, METADATA
from shardwright.checkpoint.storage import places
from shardwright.checkpoint.storage.stores import sync

OTHER_VALUES = "meta.pt"  #: in a folder, the file with what is neither model nor optimizer


# -- writing -----------------------------------------------------------------------------------------------------------


def check_target(path: Path) -> None:
    """Raise if a file cannot replace what is at ``path``. It may replace a checkpoint or a file."""
    if path.is_dir() and not places.is_checkpoint(path):
        raise IsADirectoryError(
            f'{path} is a folder, but state_dict_type="full" writes one file. Choose another path.'
        )


def write_file(values: dict[str, Any], path: Path) -> None:
    """Write a file of ``torch.save``. Anything at ``path`` stays until the new file is on disk.

    Raises:
        OSError: it cannot be written. The message names the file.
    """
    places.recover(path)
    places.make_durable(path.parent)
    attempt = places.new_attempt()
    partial = places.partial_folder(path, attempt)
    try:
        with open(partial, "xb") as stream:
            torch.save(values, stream)
            stream.flush()
            sync(stream.fileno(), path)
        places.commit(partial, path, overwrite=True)
    except BaseException as error:
        places.abandon(partial)
        reason = (
            error.__context__ if isinstance(error, RuntimeError) else error
        )  # torch reports another than it met
        if isinstance(reason, OSError):
            raise OSError(reason.errno, reason.strerror, str(path)) from error
        raise
    places.remove_leftovers(path, attempt)


# -- reading -----------------------------------------------------------------------------------------------------------


def is_sharded(path: Path) -> bool:
    """Whether a folder of a checkpoint is there, after one that was being replaced got its name back."""
    places.recover(path)
    return path.is_dir() and places.is_checkpoint(path)


def read_file(path: Path, weights_only: bool | None) -> Any:
    """The content of a file of ``torch.save``, mapped into memory, on the host.

    No code of the file runs, whatever torch's own default is, unless ``weights_only`` is False.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, no such file, or holds what is no tensor or plain value.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder without {INDEX} or {METADATA}, so it is no checkpoint. Pass the folder of a sharded "
            "checkpoint, or the file of a full checkpoint."
        )
    try:
        os.close(open_regular(path, links=True))  # torch would wait for a pipe
        return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} {not_plain(error)}; weights_only=False lets a file run any code."
        ) from error
    except (EOFError, KeyError, RuntimeError, Damaged) as error:
        raise ValueError(f"{path} cannot be read as a file of torch.save: {error}") from error


def dict_in(path: Path, weights_only: bool | None) -> dict[str, Any]:
    stored = read_file(path, weights_only)
    if not isinstance(stored, dict):
        raise ValueError(f"{path} holds a {type(stored).__name__}, but a checkpoint is a dict.")
    return stored


def other_values(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """The content of ``meta.pt``. A folder that torch's own writer has left has none."""
    file = folder / OTHER_VALUES
    return dict_in(file, weights_only) if file.is_file() else {}
