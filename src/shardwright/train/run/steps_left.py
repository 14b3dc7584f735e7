"""Whether a resume has steps left to do, by the run's folder and checkpoints. Nothing here reads a checkpoint."""

from __future__ import annotations

from shardwright.train.config import Config
from shardwright.train.errors import UserError, as_user_errors, counted
from shardwright.train.run.folder import RunFolder, checkpoints_of
from shardwright.train.run.position import saved_steps


def check_steps(config: Config, folder: RunFolder) -> None:
    """Refuse a resume for which every checkpoint has enough steps, whole or not."""
    if config.train.epochs:
        return  # the data says how many steps there are
    with as_user_errors(OSError, prefix="checkpoint.folder: "):
        steps = saved_steps(checkpoints_of(folder, config))
    if steps and min(steps) >= config.train.steps and not only_end_is_missing(config, folder, max(steps)):
        raise UserError(no_more_steps(config, folder, max(steps)))


def only_end_is_missing(config: Config, folder: RunFolder, done: int) -> bool:
    """Whether a run has `done` all its steps, but was ended before it could write its results."""
    return done == config.train.steps and folder.record().get("status") != "finished"


def no_more_steps(config: Config, folder: RunFolder, done: int) -> str:
    """The error of a resume to no further step than the `done` ones."""
    if config.train.epochs:
        return (
            f"train.epochs: expected more than the {counted(done, 'step')} that {folder.path} already has, found "
            f"{config.train.epochs:g}, which makes {config.train.steps}; set more epochs to continue"
        )
    return (
        f"train.steps: expected more than {done}, the steps that {folder.path} already has, found "
        f"{config.train.steps}; set more steps to continue"
    )
