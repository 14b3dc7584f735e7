"""The small jobs whose operations and steps `shardwright calibrate` measures, and the bytes of its collectives.

A job is the tables of a configuration. Nothing here imports torch or measures anything.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.train.config import Config
from shardwright.train.config.load import checked_config


@dataclass(frozen=True)
class Task:
    """The measurements to make.

    Attributes:
        operations: jobs whose operations are measured.
        steps: jobs whose steps are measured, for the time of the host.
        sizes: bytes of collectives.
    """

    operations: tuple[dict[str, Any], ...]
    steps: tuple[dict[str, Any], ...]
    sizes: tuple[int, ...]


def job(
    dim: int,
    ffn: int,
    vocab: int,
    seq_len: int,
    batch: int,
    layers: int = 2,
    head_dim: int = 32,
    **others: Any,
) -> dict[str, Any]:
    """Return a Llama. ``others``: further tables."""
    heads = max(dim // head_dim, 2)
    model = {
        "kind": "llama", "dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads // 2,
        "ffn_dim": ffn, "vocab_size": vocab, "max_seq_len": max(seq_len, 2048),
    }  # fmt: skip
    return {"model": model, **training(seq_len, batch), **others}


def training(seq_len: int, batch: int) -> dict[str, Any]:
    """Return the tables of a job beside its model."""
    return {"data": {"workers": 0}, "train": {"steps": 1000, "seq_len": seq_len, "micro_batch": batch}}


_BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
ON_CPU = Task(
    (
        job(96, 256, 512, 128, 2),
        job(192, 512, 1024, 128, 2, parallel={"strategy": "zero2"}),
        job(256, 640, 2048, 256, 4, parallel={"strategy": "ddp"}),
        job(512, 1408, 4096, 512, 2, head_dim=64),
        job(96, 256, 512, 128, 2, parallel=_BF16),
        job(192, 512, 1024, 128, 2, parallel=_BF16),
        job(512, 1408, 4096, 512, 2, head_dim=64, parallel=_BF16),
        job(192, 384, 512, 256, 2, layers=1, head_dim=64),
        job(192, 384, 512, 256, 2, layers=1, head_dim=64, parallel=_BF16),
        {"model": {"kind": "hybrid", "preset": "debug"}, **training(256, 2)},
    ),
    (
        job(128, 256, 256, 128, 2, layers=1),
        job(128, 256, 256, 128, 2, layers=5),
        job(128, 256, 256, 128, 2, layers=5, parallel={"strategy": "ddp"}),
        job(128, 256, 256, 128, 2, layers=5, parallel=_BF16),
        job(128, 256, 256, 128, 2, layers=4, activations={"checkpoint": "full"}),
    ),
    (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26),
)
ON_GPU = Task(
    (
        job(1024, 2816, 32768, 1024, 2, head_dim=64, parallel=_BF16),
        job(2048, 5632, 32768, 2048, 2, head_dim=128, parallel=_BF16),
        job(4096, 14336, 32768, 2048, 2, head_dim=128, layers=1, parallel=_BF16),
        job(4096, 14336, 32768, 8192, 1, head_dim=128, layers=1, parallel=_BF16),
        job(2048, 5632, 32768, 1024, 2, head_dim=128),
        {"model": {"kind": "hybrid", "preset": "150M"}, "parallel": _BF16, **training(2048, 2)},
    ),
    ON_CPU.steps,
    (1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28, 1 << 30),
)


def configured(values: Mapping[str, Any], ranks: int) -> Config:
    """Return the configuration of a small job on `ranks` ranks: one micro-batch a step on each."""
    tables: dict[str, Any] = copy.deepcopy(dict(values))
    tables["train"]["global_batch"] = tables["train"]["micro_batch"] * ranks
    return checked_config(tables, "a job of calibrate", ranks=ranks)
