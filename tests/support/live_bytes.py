"""Bytes that are alive."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Bytes of all memories that operations within the mode made and that are still there, after each of them.

    Those of the shards of ``model`` are not counted.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        shards = model.parameters() if model is not None else ()
        self.shards = {p.to_local().untyped_storage()._cdata for p in shards}  # type: ignore[attr-defined]
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self.shards:
                    self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: each for key, each in self.storages.items() if not each[0].expired()}
        self.now = sum(nbytes for _, nbytes in self.storages.values())
        self.peak = max(self.peak, self.now)
        return result
