"""Pretrained weights in and out: safetensors, and files of ``torch.save``, straight into shards and out of them.

    sw.load_pretrained(model, "llama-3-8b/", key_map=hugging_face.key_map(model.config))
    sw.save_pretrained(model, "tuned/", key_map=hugging_face.key_map(model.config))

Each rank reads only its part of a file; no rank ever holds the model. In a key map :class:`Transposed`,
:class:`Slice`, :class:`Stacked` and :class:`Joined` describe tensors that are stored in another form.
docs/pretrained.md.

Names are imported at first use, so that reading a token cache or a digest does not import the engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.checkpoint.asynchronous import AsyncCheckpoint
    from shardwright.checkpoint.load import Loaded, load_pretrained
    from shardwright.checkpoint.names import Joined, KeyMap, Slice, Stacked, Transposed
    from shardwright.checkpoint.receiving import receive_weights
    from shardwright.checkpoint.save import save_pretrained
    from shardwright.checkpoint.streaming import stream_weights
    from shardwright.checkpoint.training import load_checkpoint, save_checkpoint

__all__ = [
    "AsyncCheckpoint",
    "Joined",
    "KeyMap",
    "Loaded",
    "Slice",
    "Stacked",
    "Transposed",
    "load_checkpoint",
    "load_pretrained",
    "receive_weights",
    "save_checkpoint",
    "save_pretrained",
    "stream_weights",
]

_HOMES = {
    "AsyncCheckpoint": "asynchronous",
    "Joined": "names",
    "KeyMap": "names",
    "Loaded": "load",
    "Slice": "names",
    "Stacked": "names",
    "Transposed": "names",
    "load_checkpoint": "training",
    "load_pretrained": "load",
    "receive_weights": "receiving",
    "save_checkpoint": "training",
    "save_pretrained": "save",
    "stream_weights": "streaming",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
