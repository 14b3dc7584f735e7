"""A job in processes that another framework has started, whose process group exists and stays after the job.

The run's folder is given. If it has a checkpoint, the job goes on from there: such frameworks call the same function
again after a failure. Errors are raised, and no signal has a handler. Only if the job hangs, the watch ends the
processes: nothing else ends a rank that waits in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError

from shardwright._torch import default_store
from shardwright.train.config import Config
from shardwright.train.config.mistakes import in_one_line
from shardwright.train.errors import UserError
from shardwright.train.launch.attempts import open_or_reopen
from shardwright.train.launch.signals import restore_handlers
from shardwright.train.models.vocabulary import with_vocabulary
from shardwright.train.parallel.world import World, join_world
from shardwright.train.rank.hang_watch import watched
from shardwright.train.rank.process import Place, check_place, end_of, start_together
from shardwright.train.run.exits import End, remove_exit, write_exit
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.record import close_session
from shardwright.train.step.loop import train


def train_in_group(
    values: Mapping[str, Any], folder: Path, saved: Callable[[RunFolder, int], None] | None = None
) -> End:
    """Run the job, or the rest of it, on the ranks of the default process group. Returns how it ended.

    Args:
        values: the configuration, by section and key. `run.dir` is not used.
        folder: of the run, which all ranks share. A new one is made.
        saved: called on every rank, with the run and the step, after a checkpoint has been written.

    Raises:
        UserError: the same on every rank, for what the user has to correct.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def configured() -> Config:
        try:
            config = Config.model_validate(
                values, context={"ranks": size, "resumes": RunFolder(folder).exists()}
            )
        except ValidationError as error:
            raise UserError(in_one_line(error, "the configuration")) from None
        config = with_vocabulary(config)
        return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})})

    store = dist.PrefixStore("shardwright", default_store())
    config, dataset = start_together(configured, None, store, rank, size)
    with join_world(config) as world:
        place = _open_together(config, folder, world)
        note = None if saved is None else partial(saved, place.folder)
        with place.lock, watched(config, place.folder.path, partial(_record, place)):
            try:
                end = train(config, place.folder, dataset, world, place.resumes, place.attempt, note)
            except BaseException as error:
                if world.is_first:
                    write_exit(place.folder, end_of(error, rank), place.attempt)
                raise
            finally:
                restore_handlers()
            if world.is_first:
                write_exit(place.folder, end, place.attempt)
    return end


def _record(place: Place, end: End) -> None:
    close_session(place.folder, end)
    write_exit(place.folder, end, place.attempt)


def _open_together(config: Config, path: Path, world: World) -> Place:
    """The run's folder, which the first rank opens and locks."""
    place: Place | None = None
    outcome: list[Any] = [None, None]
    if world.is_first:
        try:
            opened = open_or_reopen(config, RunFolder(path))
            remove_exit(opened.folder)
            place = Place(opened.folder, opened.lock, opened.resumes, opened.attempt)
            outcome = [(place.resumes, place.attempt), None]
        except UserError as error:
            outcome = [None, error]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    place = place or Place(RunFolder(path), nullcontext(), *outcome[0])
    check_place(place, world)
    return place
