"""A rank starts: it reads the data, and all ranks check that they run one job, before their process group exists."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from shardwright.checkpoint import Damaged
from shardwright.train.config import Config
from shardwright.train.config.values import DataSettings
from shardwright.train.data.dataset import Dataset, check_special_tokens, load_dataset
from shardwright.train.errors import UserError
from shardwright.train.models.offers import offers_of
from shardwright.train.parallel.rank_facts import collective_timeout
from shardwright.train.parallel.world import claim_gpu, pick_device
from shardwright.train.rank.hosts import host_key, use_one_network
from shardwright.train.rank.startup_check import (
    Statement,
    agree_on_start,
    facts_of,
    first_of_host,
    signs_of_progress,
)
from shardwright.train.report.progress import START


def start_together(
    configured: Callable[[], Config], resume: str | None, store: dist.Store, rank: int, size: int
) -> tuple[Config, Dataset]:
    """Return the configuration and the data of the job, after the ranks have compared both.

    Raises:
        UserError: a rank cannot start, or has another configuration or other data. All ranks raise the same error.
    """
    try:
        config = configured()
        device = pick_device(config)
        claim_gpu(store, rank, host_key(), device)
        START.doing("reading the data")
        dataset = first_of_host(
            store,
            rank,
            lambda: read_data(config.for_data, progress=rank == 0, advanced=signs_of_progress(store)),
        )
        shape = config.model.shape()
        fingerprints = dataset.fingerprints | offers_of(shape).fingerprints(shape)
        statement = Statement(facts_of(config.model_dump(), fingerprints, resume, device.type))
    except (UserError, OSError, Damaged) as error:
        agree_on_start(store, rank, size, Statement({}, str(error)), collective_timeout())
        raise UserError(str(error)) from error
    START.doing("waiting for the other ranks")
    agree_on_start(store, rank, size, statement, collective_timeout())
    use_one_network(store, rank, size)
    store.set_timeout(collective_timeout())
    return config, dataset


def read_data(
    settings: DataSettings, progress: bool = False, advanced: Callable[[], None] = lambda: None
) -> Dataset:
    """Return the data of a run, whose documents spell no special tokens unless the configuration allows it."""
    dataset = load_dataset(settings, progress, advanced)
    check_special_tokens(settings, dataset)
    return dataset
