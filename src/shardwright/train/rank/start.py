"""A rank starts: it reads the data, and all ranks check that they run one job, before their process group exists."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from shardwright.checkpoint import Damaged
from shardwright.train.config import Config
from shardwright.train.config.shapes.foreign import HuggingFaceShape, PythonShape
from shardwright.train.data.dataset import Dataset, check_special_tokens, load_dataset
from shardwright.train.errors import UserError
from shardwright.train.parallel.rank_facts import collective_timeout
from shardwright.train.parallel.world import pick_device
from shardwright.train.rank.hosts import use_one_network
from shardwright.train.rank.startup_check import (
    MODEL,
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
    """The configuration and the text, once all ranks have the same. Where one cannot start, all raise its UserError."""
    try:
        config = configured()
        device = pick_device(config)
        START.doing("reading the data")
        dataset = first_of_host(
            store, rank, lambda: read_data(config, progress=rank == 0, advanced=signs_of_progress(store))
        )
        fingerprints = {**dataset.fingerprints, **_model_fingerprint(config)}
        statement = Statement(facts_of(config, fingerprints, resume, device.type))
    except (UserError, OSError, Damaged) as error:
        agree_on_start(store, rank, size, Statement({}, str(error)), collective_timeout())
        raise UserError(str(error)) from error
    START.doing("waiting for the other ranks")
    agree_on_start(store, rank, size, statement, collective_timeout())
    use_one_network(store, rank, size)
    store.set_timeout(collective_timeout())
    return config, dataset


def read_data(config: Config, progress: bool = False, advanced: Callable[[], None] = lambda: None) -> Dataset:
    dataset = load_dataset(config, progress, advanced)
    check_special_tokens(config, dataset)
    return dataset


def _model_fingerprint(config: Config) -> dict[str, str]:
    """The digest of the files behind `model.path`, or of the file of `model.target`, under its name in messages. Empty
    for a model without files."""
    shape = config.model.shape()
    if isinstance(shape, PythonShape):
        return _code_fingerprint(shape.target.partition(":")[0])
    if not isinstance(shape, HuggingFaceShape):
        return {}
    from shardwright.train.models.hf import transformers_model

    return {MODEL: transformers_model.fingerprint(shape)}


def _code_fingerprint(module: str) -> dict[str, str]:
    """The digest of a module's file. Empty if it is not found; building the model says so."""
    try:
        spec = importlib.util.find_spec(module)
        file = Path(spec.origin) if spec is not None and spec.origin is not None else None
        return (
            {} if file is None else {f"the file of {module}": hashlib.sha256(file.read_bytes()).hexdigest()}
        )
    except (ImportError, OSError, ValueError):
        return {}
