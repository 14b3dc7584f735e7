"""Checkpoints of training, pretrained weights, and weights that travel to other processes.

    sw.save_checkpoint("step-100", model, optimizer, extra={"step": 100})                    # docs/checkpoints.md
    extra = sw.load_checkpoint("step-100", model, optimizer)
    sw.load_pretrained(model, "llama-3-8b/", key_map=hugging_face.key_map(model.config))     # docs/pretrained.md

Each rank reads and writes only its part; no rank ever holds the model. Programs that look into checkpoints find here
:func:`open_checkpoint`, :class:`Damaged` and the random generators. The trainer and the Fabric strategy save and load
through these names. In a key map :class:`Transposed`, :class:`Slice`, :class:`Stacked` and :class:`Joined` describe
tensors that are stored in another form.

``training`` has the state of a run, and ``asynchronous`` writes it in the background. Both use ``save`` and ``load``.
These use ``format``, the form of files, and ``storage``, the places of files: folders and URLs. ``dcp`` reads folders
of torch's distributed checkpoint. ``pretrained``, ``stream`` and ``convert`` are the other ways in and out.

Names are imported at first use, so that reading a token cache or a digest does not import the engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwright.engine.errors import Damaged

if TYPE_CHECKING:
    from shardwright.checkpoint.asynchronous.async_checkpoint import AsyncCheckpoint
    from shardwright.checkpoint.format.index import UnknownVersion
    from shardwright.checkpoint.format.nested import nested
    from shardwright.checkpoint.load.checkpoints import StoredForm
    from shardwright.checkpoint.pretrained.key_maps import Joined, KeyMap, Slice, Stacked, Transposed
    from shardwright.checkpoint.pretrained.load_pretrained import Loaded, load_pretrained
    from shardwright.checkpoint.pretrained.save_pretrained import save_pretrained
    from shardwright.checkpoint.storage.housekeeping import (
        check_writable,
        is_checkpoint,
        list_checkpoints,
        remove_checkpoint,
        remove_unfinished,
        replaces_checkpoints,
    )
    from shardwright.checkpoint.storage.local_store import has_description
    from shardwright.checkpoint.storage.locations import folder_or_url
    from shardwright.checkpoint.storage.publishing import write_file
    from shardwright.checkpoint.stream.receive import receive_weights
    from shardwright.checkpoint.stream.send import stream_weights
    from shardwright.checkpoint.training.generators import (
        generator_states,
        seed_generators,
        set_generator_states,
    )
    from shardwright.checkpoint.training.load_checkpoint import load_checkpoint
    from shardwright.checkpoint.training.open_checkpoint import StoredCheckpoint, open_checkpoint
    from shardwright.checkpoint.training.save_checkpoint import save_checkpoint, save_state

__all__ = [
    "AsyncCheckpoint",
    "Damaged",
    "Joined",
    "KeyMap",
    "Loaded",
    "Slice",
    "Stacked",
    "StoredCheckpoint",
    "StoredForm",
    "Transposed",
    "UnknownVersion",
    "check_writable",
    "folder_or_url",
    "generator_states",
    "has_description",
    "is_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "load_pretrained",
    "nested",
    "open_checkpoint",
    "receive_weights",
    "remove_checkpoint",
    "remove_unfinished",
    "replaces_checkpoints",
    "save_checkpoint",
    "save_pretrained",
    "save_state",
    "seed_generators",
    "set_generator_states",
    "stream_weights",
    "write_file",
]

#: The module of each name.
_HOMES = {
    name: module
    for module, names in {
        "asynchronous.async_checkpoint": "AsyncCheckpoint",
        "format.index": "UnknownVersion",
        "format.nested": "nested",
        "load.checkpoints": "StoredForm",
        "pretrained.load_pretrained": "Loaded load_pretrained",
        "pretrained.key_maps": "Joined KeyMap Slice Stacked Transposed",
        "pretrained.save_pretrained": "save_pretrained",
        "storage.housekeeping": (
            "check_writable is_checkpoint list_checkpoints remove_checkpoint remove_unfinished replaces_checkpoints"
        ),
        "storage.local_store": "has_description",
        "storage.locations": "folder_or_url",
        "storage.publishing": "write_file",
        "stream.receive": "receive_weights",
        "stream.send": "stream_weights",
        "training.generators": "generator_states seed_generators set_generator_states",
        "training.load_checkpoint": "load_checkpoint",
        "training.open_checkpoint": "StoredCheckpoint open_checkpoint",
        "training.save_checkpoint": "save_checkpoint save_state",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
