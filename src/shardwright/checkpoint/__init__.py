"""Pretrained weights in and out: safetensors, and files of ``torch.save``, straight into shards and out of them.

    sw.load_pretrained(model, "llama-3-8b/", key_map=hugging_face.key_map(model.config))
    sw.save_pretrained(model, "tuned/", key_map=hugging_face.key_map(model.config))

Each rank reads only its part of a file; no rank ever holds the model. In a key map :class:`Transposed`,
:class:`Slice`, :class:`Stacked` and :class:`Joined` describe tensors that are stored in another form.
docs/pretrained.md.
"""

from shardwright.checkpoint.load import Loaded, load_pretrained
from shardwright.checkpoint.names import Joined, KeyMap, Slice, Stacked, Transposed
from shardwright.checkpoint.receiving import receive_weights
from shardwright.checkpoint.save import save_pretrained
from shardwright.checkpoint.streaming import stream_weights

__all__ = [
    "Joined",
    "KeyMap",
    "Loaded",
    "Slice",
    "Stacked",
    "Transposed",
    "load_pretrained",
    "receive_weights",
    "save_pretrained",
    "stream_weights",
]
