"""The memories that deferred tensors view, and pairs of memories that may be one memory on some devices.

Nothing here records or runs an operation.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwright.engine.compat import storage_key, storage_use_count
from shardwright.init.log import Memory, View


class Memories:
    """The memories of deferred tensors, found by their storage."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}
        self._moved: dict[Memory, list[Memory]] = {}  #: to the CPU; no copies if the model is for the CPU

    def of(self, tensor: torch.Tensor) -> Memory:
        """Return the memory that a tensor views."""
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage_key(storage))
        if memory is None:  # the registry keeps the storage, so no other storage gets its address
            memory = self._memories[storage_key(storage)] = Memory(storage, None)
        return memory

    def add(self, tensor: torch.Tensor, device: torch.device | None) -> Memory:
        """Return the memory that a tensor views. If it is a new one, it is at ``device``."""
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self._memories:
            self._memories[storage_key(storage)] = Memory(storage, device)
        return self._memories[storage_key(storage)]

    def view_of(self, tensor: torch.Tensor) -> View:
        """Return the tensor as a view of its memory.

        Raises:
            RuntimeError: the memory was materialised.
            NotImplementedError: the tensor is a negative view.
        """
        memory = self.of(tensor)
        if memory.gone:
            raise RuntimeError(
                f"A deferred tensor of shape {tuple(tensor.shape)} was used after {memory.gone}"
            )
        if tensor.is_neg():
            raise NotImplementedError(
                "deferred_init does not support negative views, such as Tensor.imag of conj()"
            )
        size, stride = tuple(tensor.shape), tensor.stride()
        return View(memory, tensor.dtype, size, stride, int(tensor.storage_offset()), tensor.is_conj())

    def live(self) -> list[Memory]:
        """Memories that were not materialised and that a tensor still views. Other memories are removed."""
        viewed = [m for m in self._memories.values() if storage_use_count(m.storage) > 1]
        self._memories = {storage_key(m.storage): m for m in viewed}
        self._moved = {m: self._moved[m] for m in viewed if m in self._moved}
        return [m for m in viewed if not m.gone]

    def note_move(self, source: Memory, copy: Memory) -> None:
        """Note that a move to the CPU made ``copy``. If the model is for the CPU, it is ``source`` itself."""
        self._moved.setdefault(source, []).append(copy)
        self._moved.setdefault(copy, []).append(source)

    def refuse_if_moved(self, changed: Iterable[Memory]) -> None:
        """Raise if one of these was moved, or made by a move, and a tensor still views the other one.

        If the model is for the CPU, the move did nothing, so a plain build would change both.
        """
        for memory in changed:
            if any(storage_use_count(other.storage) > 1 for other in self._moved.get(memory, ())):
                raise NotImplementedError(
                    "A deferred tensor was moved to the CPU inside deferred_init, and then the copy or the original "
                    "was changed in place while both exist. Whether this changes both depends on the device of the "
                    "model, which is not known yet. Change a clone."
                )
