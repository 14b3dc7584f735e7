"""torch's distributed checkpoints: the boxes of a tensor that a rank writes and reads, and entries of their index.

Each function imports torch's package when it is called, because its 80 modules take long to import. The engine's own
checkpoints are in ``shardwright/checkpoint``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def boxes_to_save(name: str, tensor: torch.Tensor) -> list[tuple[Sequence[int], torch.Tensor]]:
    """Return the offsets and the memory of each box of a tensor that this rank writes to a checkpoint.

    This follows the protocol of torch's distributed checkpoint, which DTensors and others have.
    """
    from torch.distributed.checkpoint.planner_helpers import _create_write_items
    from torch.distributed.checkpoint.utils import find_state_dict_object

    boxes: list[tuple[Sequence[int], torch.Tensor]] = []
    for item in _create_write_items(name, tensor):
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        boxes.append((chunk.offsets, find_state_dict_object({name: tensor}, item.index)))
    return boxes


def boxes_to_load(name: str, tensor: torch.Tensor) -> list[tuple[Sequence[int], torch.Tensor]]:
    """Return the offsets and the memory of each box of a tensor that this rank reads from a checkpoint."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
    from torch.distributed.checkpoint.utils import find_state_dict_object

    return [
        (
            chunk.offsets,
            find_state_dict_object({name: tensor}, MetadataIndex(name, chunk.offsets, number)),
        )
        for number, chunk in enumerate(_create_chunk_list(tensor))
    ]


def flatten_state_dict(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Return the values of nested containers by the names of torch's distributed checkpoint, and the path to each."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten

    return flatten(state)


def storage_info(file: str, start: int, length: int) -> Any:
    """Return the entry with which torch's distributed checkpoint names the bytes of one value in a file."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, length)
