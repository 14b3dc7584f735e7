"""Jobs whose models are not of this package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardwright.train.step.trainer import Trainer
from tests.train.kit.jobs import TINY, tiny, trainer

JOB = re.sub(r"\[model\].*?\[train\]", "[train]", TINY, flags=re.DOTALL).replace('engine = "none"', "")
JOB = JOB.replace("steps = 8", "steps = 3")
"""The tiny job without a model, with the engine shardwright."""

NATIVE = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "max_seq_len")
"""Keys of the tiny job that only native models have."""


def job_of(path: Path, rank: int, world_size: int, **options: Any) -> Trainer:
    """The trainer of one rank, with the transformers model in a folder. Options: keys of `[parallel]`, or sections."""
    activations = options.pop("activations", {})
    config = tiny(
        model={**dict.fromkeys(NATIVE), "kind": "hf", "path": str(path), **options.pop("model", {})},
        train={"seq_len": 16, "global_batch": 4, **options.pop("train", {})},
        activations=activations,
        parallel={"engine": "shardwright", **options},
    )
    return trainer(config, rank, world_size)
