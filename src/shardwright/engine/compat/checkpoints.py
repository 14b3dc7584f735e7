"""torch's distributed checkpoints: the boxes of a tensor that a rank writes and reads, and entries of their index.

Each function imports torch's package when it is called, because its 80 modules take long to import. The engine's own
checkpoints are in ``shardwright/checkpoint``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint


def boxes_to_save(name: str, tensor: torch.Tensor) -> list[tuple[Sequence[int], torch.Tensor]]:
    """Offsets and memory of the boxes of a tensor that this rank gives to a checkpoint.

    By the protocol of torch's distributed checkpoint, for DTensors, ShardedTensors and tensors that have it.
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
    """Offsets and memory of the boxes of a tensor that this rank takes from a checkpoint."""
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
    """Values of nested containers by names, and the path to each, as torch's distributed checkpoint has them."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten

    return flatten(state)


def storage_info(file: str, start: int, length: int) -> Any:
    """An entry of torch's distributed checkpoint: the bytes of a value in a file."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, length)
