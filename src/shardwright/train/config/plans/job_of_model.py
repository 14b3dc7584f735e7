"""The configuration of a job of which only the model and the number of ranks are known: the rest is assumed.

Nothing here imports torch or transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.train.config.load import checked_config
from shardwright.train.config.schema import Config
from shardwright.train.config.shapes.foreign import HuggingFaceShape
from shardwright.train.errors import UserError

Overrides = Sequence[tuple[str, str]]
"""Keys of the configuration, as SECTION.KEY, and the texts of their values."""

MODEL_PREFIX = "hf:"  #: of the name of a model in place of a file
SEQ_LEN = 4096  #: or the longest sequence of the model, if that is shorter
#: Keys with assumed values that decide how much memory a job needs.
ASSUMED_KEYS = (
    "train.seq_len", "train.micro_batch", "train.global_batch", "parallel.strategy", "parallel.param_dtype",
    "parallel.reduce_dtype", "optimizer.name", "activations.checkpoint", "finetune.method",
)  # fmt: skip


def assumed_job(model: str, overrides: Overrides, ranks: int) -> Callable[[Overrides], Config]:
    """Return a job that trains a model of transformers in bfloat16, one sequence at a time: a function from keys to it.

    `model`: `hf:` with the folder of a model, or its name on the hub. Only its config.json is read.

    Raises:
        UserError: it is not a causal language model. The function that is returned raises it for a wrong key.
    """
    path = model.removeprefix(MODEL_PREFIX)
    try:
        longest = HuggingFaceShape(path, "random").max_seq_len
    except ValueError as error:
        raise UserError(f"{model}: {str(error).removeprefix('path: ')}") from None
    micro_batch = dict(overrides).get("train.micro_batch", "1")

    def configured(keys: Overrides) -> Config:
        values: dict[str, Any] = {
            "model": {"kind": "hf", "path": path, "weights": "random"},
            "train": {
                "seq_len": min(SEQ_LEN, longest or SEQ_LEN),
                "micro_batch": 1,
                "global_batch": ranks * _number(micro_batch),
            },
            "parallel": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        }
        return checked_config(values, model, [*overrides, *keys], ranks=ranks)

    return configured


def _number(text: str) -> int:
    """Return the number in a text; 1 for a text that is refused later."""
    return int(text) if text.isdecimal() and int(text) else 1
