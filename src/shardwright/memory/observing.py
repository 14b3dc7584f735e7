"""Observers of the memory that the engine takes and gives back: simulators of a device, and plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Observer(Protocol):
    """Called in the order of the program, on the host; the device's current stream is that of the memory's use."""

    def leased(self, slab: Any) -> None:
        """A :class:`Slab` has memory now."""

    def releases(self, slab: Any) -> None:
        """A slab is about to give its memory back."""

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """A storage is about to get another size: of a slab that takes memory from torch's allocator, or of a tensor
        that the engine frees."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """It has its new size."""


observers: list[Observer] = []  #: entered by :func:`observe`


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Inside the context ``observer`` sees the leases, releases and resized storages of this process."""
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give a storage another size. 0 frees its memory."""
    for observer in observers:
        observer.resizes(storage, nbytes)
    storage.resize_(nbytes)
    for observer in observers:
        observer.resized(storage)
