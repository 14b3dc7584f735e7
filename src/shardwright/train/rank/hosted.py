"""A job in processes that another framework has started, whose process group exists and stays after the job.

The run's folder is given. If it has a checkpoint, the job goes on from there: such frameworks call the same function
again after a failure. Errors are raised, and no signal has a handler. Only if the job hangs, the watch ends the
processes: nothing else ends a rank that waits in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError

from shardwright.engine.compat import default_store
from shardwright.train.config import Config
from shardwright.train.config.mistakes import in_one_line
from shardwright.train.errors import UserError
from shardwright.train.launch.signals import restore_handlers
from shardwright.train.models.vocabulary import with_vocabulary
from shardwright.train.rank.process import IndependentRank, complaint_of, train_together
from shardwright.train.run.exits import Outcome
from shardwright.train.run.finding import CONTINUE
from shardwright.train.run.folder import RunFolder


def train_in_group(
    values: Mapping[str, Any], folder: Path, saved: Callable[[RunFolder, int], None] | None = None
) -> Outcome:
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

    # Each job in the group has keys of its own.
    number = default_store().add(f"shardwright jobs of rank {rank}", 1)
    store = dist.PrefixStore(f"shardwright job {number}", default_store())
    job = IndependentRank(configured, CONTINUE, store=store)
    try:
        return train_together(job, configured, CONTINUE, store, rank, size, saved)
    except BaseException as error:
        job.record_failure(complaint_of(error, rank))
        raise
    finally:
        restore_handlers()
