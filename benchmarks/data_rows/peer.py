"""The peer of ``benchmarks/data.py``: datasets, the library tokenizers, TRL's packing, torch's DataLoader.

The tokenizer is called as shardwright calls it, without the layer of transformers, which takes longer. Batches of
``best_fit`` are those of TRL's collator with ``padding_free``; TRL's own is not imported, because it imports trainers.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.data_rows.corpus import END
from benchmarks.data_rows.measure import Order, Watch


def tokenise(order: Order) -> dict[str, Any]:
    """Documents to tokens in an empty cache."""
    import datasets  # noqa: F401  # imports are not measured here

    watch = Watch()
    rows = _tokens(order)
    figures = watch.figures()
    return {"tokens": sum(map(len, rows.with_format("arrow")["input_ids"])), **figures}


def read(order: Order) -> dict[str, Any]:
    """All batches of an epoch from a cache that holds the packed samples."""
    loader = _loader(order, _samples(order))
    watch = Watch()
    tokens = batches = 0
    for batch in loader:
        tokens += batch["input_ids"].numel()
        batches += 1
    del loader  # ends its processes
    return {"tokens": tokens, "batches": batches, **watch.figures()}


def first_batch(order: Order) -> dict[str, Any]:
    """From the start of the process to the first batch, or to the batch in the middle of the epoch."""
    loader = _loader(order, _samples(order))
    start = len(loader) // 2 if order.resume else 0
    watch = Watch()
    if start:
        from accelerate import skip_first_batches

        loader = skip_first_batches(loader, start)
    shape = list(next(iter(loader))["input_ids"].shape)
    return {"shape": shape, "batch": start, **watch.figures(), "since_start": order.since_start()}


def _tokens(order: Order) -> Any:
    from datasets import load_dataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(order.tokenizer) / "tokenizer.json"))
    end = tokenizer.token_to_id(END)

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"input_ids": [[*each.ids, end] for each in encodings]}

    rows = load_dataset("json", data_files=order.documents, split="train", cache_dir=order.cache)
    return rows.map(encode, batched=True, num_proc=_processes(order), remove_columns=["text"])


def _samples(order: Order) -> Any:
    rows = _tokens(order)
    if order.packing == "best_fit":
        from trl import pack_dataset

        return pack_dataset(rows, order.seq_len, "bfd_split", {"num_proc": _processes(order)})
    seq_len = order.seq_len

    def concatenate(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        ids = list(chain.from_iterable(rows["input_ids"]))
        stop = len(ids) // seq_len * seq_len
        return {"input_ids": [ids[start : start + seq_len] for start in range(0, stop, seq_len)]}

    return rows.map(concatenate, batched=True, num_proc=_processes(order))


def _processes(order: Order) -> int | None:
    return order.processes if order.processes > 1 else None


def _loader(order: Order, samples: Any) -> Any:
    from torch.utils.data import DataLoader

    collate = None
    if order.packing == "best_fit":
        collate = _padding_free
    else:
        samples = samples.with_format("torch")
    return DataLoader(
        samples,
        batch_size=order.batch,
        shuffle=True,
        drop_last=True,
        num_workers=order.workers,
        collate_fn=collate,
    )


def _padding_free(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of all documents: ids, labels that no first token of a document has, and positions."""
    import torch

    lengths = torch.tensor([length for row in rows for length in row["seq_lengths"]])
    ids = torch.cat([torch.tensor(row["input_ids"]) for row in rows])
    steps = torch.ones_like(ids)
    steps[0] = 0
    steps[lengths[:-1].cumsum(0)] = 1 - lengths[:-1]
    positions = steps.cumsum(0)
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}
