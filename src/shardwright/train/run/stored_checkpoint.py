"""A checkpoint of a run on disk: where the run stood, what it holds, and whether it can be whole.

It is a folder checkpoints/step-N by ``sw.save_checkpoint``. Nothing here communicates or executes a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint import Damaged, StoredCheckpoint, open_checkpoint
from shardwright.train.run.past import Past
from shardwright.train.run.position import FolderOrUrl, Position

HOOK = "hook_"
"""Prefix of the key of a hook's state in `extra`; the hook's name follows."""


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint whose description is sound, and where the run stood."""

    position: Position
    checkpoint: StoredCheckpoint

    @property
    def folder(self) -> str:
        """The folder, or the URL."""
        return self.checkpoint.path


def examine(folder: FolderOrUrl) -> RunCheckpoint:
    """Read what describes a checkpoint of a run.

    Raises:
        Damaged: it contradicts itself or the folder's name, or the folder holds none.
        UnknownVersion: a later version of shardwright has saved it.
    """
    try:
        checkpoint = open_checkpoint(folder)
    except FileNotFoundError:
        gone = "it is not whole"
        if isinstance(folder, Path):
            gone = "the folder holds no checkpoint" if folder.is_dir() else "the folder is not there"
        raise Damaged(gone) from None
    if not checkpoint.has_digests:
        raise Damaged(f"it has {checkpoint.description} alone, so it is no checkpoint of a run")
    position = position_in(checkpoint)
    if str(folder).rpartition("/")[2] != f"step-{position.step}":
        raise Damaged(f"{checkpoint.description} is of step {position.step}")
    return RunCheckpoint(position, checkpoint)


def position_in(checkpoint: StoredCheckpoint) -> Position:
    """Return the position of the run. Raises Damaged for a checkpoint that no run has saved."""
    content = checkpoint.value("extra", "position")
    if not isinstance(content, Mapping) or content.keys() - {"past"} != {"step", "samples"}:
        raise Damaged(f"{checkpoint.description} has no position of a run")
    step, samples = content["step"], content["samples"]
    if type(step) is not int or type(samples) is not int or step < 0 or samples < 0:
        raise Damaged(f"{checkpoint.description} has no position of a run")
    try:
        return Position(step, samples, Past.from_stored(content.get("past", {})))
    except ValueError as error:
        raise Damaged(f"{checkpoint.description} has no position of a run: {error}") from None
