"""Files of checkpoints of named states: one file by ``torch.save``, and folders of other writers than ours.

A file may replace the folder of a checkpoint, and a folder a file. Reading runs no code of a file. Folders with
``meta.pt`` are by Lightning's own strategies.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint import INDEX, METADATA, Damaged, is_checkpoint, not_plain, open_regular

OTHER_VALUES = "meta.pt"  #: in a folder, the file with what is neither model nor optimizer


# -- writing -----------------------------------------------------------------------------------------------------------


def check_target(path: Path) -> None:
    """Raise if a file cannot replace what is at ``path``. It may replace a checkpoint or a file."""
    if not is_checkpoint(path) and path.is_dir():
        raise IsADirectoryError(
            f'{path} is a folder, but state_dict_type="full" writes one file. Choose another path.'
        )


# -- reading -----------------------------------------------------------------------------------------------------------


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
