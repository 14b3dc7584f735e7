"""A slab: one storage object over which views are made once, and memory that comes and goes below it.

Autograd saves views of parameters. It needs the same *storage object*, not the same address, so a slab keeps its
storage for life and a lease only attaches memory to it. Policies about where memory comes from belong to allocators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Slab:
    """``nbytes`` bytes on ``device``, empty until :meth:`lease`, empty again after :meth:`release`.

    Reading a view of a released slab is an error that torch does not catch (on CPU the process may crash), so
    whoever releases it first takes the views out of the module's reach.
    """

    __slots__ = ("_storage", "device", "leased", "nbytes")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        self._storage = torch.UntypedStorage(0, device=device)
        self.leased = False

    @property
    def address(self) -> int:
        """Where the memory lies now; 0 while released."""
        return self._storage.data_ptr()

    def lease(self) -> None:
        """Attach memory, contents undefined. Made on the current stream of the device."""
        if not self.leased:
            self._storage.resize_(self.nbytes)
            self.leased = True

    def release(self) -> None:
        """Give the memory back. On CUDA the current stream must be ordered after every use of it."""
        if self.leased:
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
