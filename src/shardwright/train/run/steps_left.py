"""Whether a resume has steps left to do, by the run's folder and checkpoints. Nothing here loads a checkpoint."""

from __future__ import annotations

from shardwright.train.config import CheckpointConfig, TrainConfig
from shardwright.train.errors import UserError, as_user_errors, counted
from shardwright.train.run.folder import RunFolder, checkpoints_of
from shardwright.train.run.position import FolderOrUrl, saved_steps, step_folder

MOST_BYTES = 2 << 30
"""The largest checkpoint that is compared with its digests before the ranks start: in about two seconds."""


def check_steps(train: TrainConfig, settings: CheckpointConfig, folder: RunFolder) -> None:
    """Refuse a resume for which every checkpoint has enough steps, whole or not."""
    if train.epochs:
        return  # the data says how many steps there are
    with as_user_errors(OSError, prefix="checkpoint.folder: "):
        checkpoints = checkpoints_of(folder, settings)
        steps = saved_steps(checkpoints)
    if not steps or max(steps) < train.steps or only_end_is_missing(train, folder, max(steps)):
        return
    # A resume goes back to an earlier checkpoint if the newest one is damaged.
    if min(steps) >= train.steps or _is_whole(step_folder(checkpoints, max(steps))):
        raise UserError(no_more_steps(train, folder, max(steps)))


def _is_whole(checkpoint: FolderOrUrl) -> bool:
    """Return whether a checkpoint here is known to be whole. A large one is not read: the ranks find out."""
    from shardwright.checkpoint import (
        open_checkpoint,  # imports the engine, which a launcher needs for this alone
    )

    if isinstance(checkpoint, str):
        return False
    try:
        stored = open_checkpoint(checkpoint)
        if not stored.has_digests or sum(stored.files.values()) > MOST_BYTES:
            return False
        stored.check_lengths()
        stored.verify(lambda done: None)
    except (OSError, ValueError):
        return False
    return True


def only_end_is_missing(train: TrainConfig, folder: RunFolder, done: int) -> bool:
    """Return whether a run has `done` all its steps, but was ended before it could write its results."""
    return done == train.steps and folder.record().get("status") != "finished"


def no_more_steps(train: TrainConfig, folder: RunFolder, done: int) -> str:
    """Return the error of a resume to no further step than the `done` ones."""
    if train.epochs:
        return (
            f"train.epochs: expected more than the {counted(done, 'step')} that {folder.path} already has, found "
            f"{train.epochs:g}, which makes {train.steps}; set more epochs to continue"
        )
    return (
        f"train.steps: expected more than {done}, the steps that {folder.path} already has, found "
        f"{train.steps}; set more steps to continue"
    )
