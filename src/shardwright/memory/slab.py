"""A slab: one storage object over which views are made once, and memory that comes and goes below it.

Autograd saves views of parameters. It needs the same *storage object*, not the same address, so a slab keeps its
storage for life and a lease only attaches memory to it. Policies about where memory comes from belong to allocators.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch


class Slab:
    """``nbytes`` bytes on ``device``, empty until :meth:`lease`, empty again after :meth:`release`.

    Reading a view of a released slab is an error that torch does not always catch (the process may crash), so
    whoever releases it first takes the views out of the module's reach. With ``SHARDWRIGHT_POISON=1`` in the
    environment when a slab is made, a released slab keeps its memory and reads as NaN in every floating-point dtype.
    """

    __slots__ = ("_poison", "_storage", "device", "leased", "nbytes")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        self._storage = torch.UntypedStorage(0, device=device)
        self.leased = False
        self._poison = os.environ.get("SHARDWRIGHT_POISON") == "1"

    @property
    def address(self) -> int:
        """Where the memory lies now; 0 while released."""
        return self._storage.data_ptr()

    def lease(self) -> None:
        """Attach memory, contents undefined. Made on the current stream of the device."""
        if not self.leased:
            if self._storage.nbytes() != self.nbytes:
                self._storage.resize_(self.nbytes)
            self.leased = True

    def release(self) -> None:
        """Give the memory back. On CUDA the current stream must be ordered after every use of it."""
        if self.leased:
            if self._poison:
                self._storage.fill_(255)  # type: ignore[attr-defined]
            elif self._storage.resizable():  # not while numpy shares it
                self._storage.resize_(0)
            self.leased = False

    def view(
        self, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor over the slab, ``offset`` in elements of ``dtype``. Made while leased; stays right for ever."""
        if stride is None:
            stride = torch.empty(0, dtype=dtype, device="meta").new_empty(tuple(size)).stride()
        return torch.empty(0, dtype=dtype, device=self.device).set_(
            self._storage, offset, tuple(size), tuple(stride)
        )

    def byte_view(self, offset: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` bytes from byte ``offset`` as uint8."""
        return self.view(torch.uint8, offset, (nbytes,), (1,))
