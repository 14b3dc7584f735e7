"""Shardwright's part of ``benchmarks/data.py``: each task runs in its own process and returns its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.data_rows.measure import Order, Watch


def tokenise(order: Order) -> dict[str, Any]:
    """Documents to tokens in an empty cache."""
    from shardwright.train.data.sources.documents import DataFiles
    from shardwright.train.data.tokens.cache import tokenised
    from shardwright.train.data.tokens.tokenizers import open_tokenizer

    watch = Watch()
    tokens = tokenised(
        DataFiles((order.documents,)),
        open_tokenizer(order.tokenizer),
        cache=Path(order.cache),
        workers=order.processes,
    )
    return {"tokens": len(tokens.ids), **watch.figures()}


def read(order: Order) -> dict[str, Any]:
    """All batches of an epoch from a cache that holds the tokens."""
    dataset, share = _dataset(order), _share(order)
    from shardwright.train.data.samples.loader import Loader

    steps = dataset.windows // order.batch
    watch = Watch()
    tokens = 0
    with Loader(dataset.train, share, stop=steps * order.batch, workers=order.workers) as loader:
        for step in loader:
            tokens += step.trained
    return {"tokens": tokens, "batches": steps, **watch.figures()}


def first_batch(order: Order) -> dict[str, Any]:
    """From the start of the process to the first batch, or to the batch in the middle of the epoch."""
    dataset, share = _dataset(order), _share(order)
    from shardwright.train.data.samples.loader import Loader

    start = dataset.windows // order.batch // 2 if order.resume else 0
    watch = Watch()
    with Loader(dataset.train, share, first=start * order.batch, workers=order.workers) as loader:
        shape = list(next(loader).batches[0].inputs.shape)
        return {"shape": shape, "batch": start, **watch.figures(), "since_start": order.since_start()}


def _dataset(order: Order) -> Any:
    from shardwright.train.config import load_config
    from shardwright.train.data.dataset import load_dataset

    settings = {
        "model.preset": "debug",
        "data.source": order.documents,
        "data.tokenizer": order.tokenizer,
        "data.cache": order.cache,
        "data.packing": order.packing,
        # The peer's batches of "split" are one text, and those of "best_fit" are kept apart.
        "data.document_mask": str(order.packing == "best_fit").lower(),
        "data.validation_fraction": "0.001",
        "validation.every": "0",
        "train.seq_len": str(order.seq_len),
        "train.global_batch": str(order.batch),
        "train.micro_batch": str(order.batch),
    }
    empty = Path(order.cache).with_suffix(".toml")
    empty.touch()
    return load_dataset(load_config(empty, list(settings.items())).for_data)


def _share(order: Order) -> Any:
    from shardwright.train.data.samples.loader import Share

    return Share(order.batch, order.batch)
