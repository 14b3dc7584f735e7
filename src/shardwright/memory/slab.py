"""Slabs, memory that a tensor view survives losing; and the protocol of what gives them their memory.

A slab's storage object is made once, and so are the views of it. Leasing gives the storage memory, releasing takes it
away; autograd compares storages, not addresses, so a view it saved is right again when the slab is leased again.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from shardwright._torch import block_of, swap_memory


@runtime_checkable
class Allocator(Protocol):
    """Gives slabs their memory. ``fully_shard(root, memory=...)`` takes any object with these two methods.

    The engine calls both on the host, in the order of the program. The device's current stream is then the stream that
    uses the memory first, or that used it last. A slab has ``nbytes``, ``device``, ``unit`` (a name) and ``kind``.
    """

    def lease(self, slab: Slab) -> torch.Tensor | None:
        """Memory for a slab until :meth:`release`: a contiguous uint8 tensor of ``slab.nbytes`` bytes or more on
        ``slab.device``, at an address that is a multiple of 16. No other lease may use this memory meanwhile. None:
        torch's allocator gives the memory.
        """

    def release(self, slab: Slab, memory: torch.Tensor | None) -> bool | None:
        """The slab no longer needs ``memory``, the very tensor (uint8, or None) that :meth:`lease` returned.

        Return True if the slab's next lease usually returns the same memory; the engine then keeps its views of it.
        """


class Source(Protocol):
    """Memory of a special kind, such as that which the network reads and writes by itself.

    Attributes:
        kinds: the slabs that need it, by their kind; None for all.
    """

    kinds: frozenset[str] | None

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 tensor of so many bytes."""


class Dynamic:
    """torch's own allocator for every lease, or the slab owner's source."""

    def lease(self, slab: Slab) -> torch.Tensor | None:
        source = slab.owner.source
        if source is None or not slab.nbytes or (source.kinds is not None and slab.kind not in source.kinds):
            return None
        return source.take(slab.nbytes, slab.device)

    def release(self, slab: Slab, memory: torch.Tensor | None) -> None:
        return None


DYNAMIC = Dynamic()


class Owner:
    """Whose slabs are, where the memory of their next leases comes from, and of what kind it must be."""

    __slots__ = ("allocator", "name", "slabs", "source")

    def __init__(self, name: str = "", allocator: Allocator = DYNAMIC) -> None:
        self.name: str = name
        self.allocator: Allocator = allocator
        self.source: Source | None = None
        self.slabs: weakref.WeakSet[Slab] = weakref.WeakSet()


class Slab:
    """Memory of one unit, leased and released.

    Attributes:
        nbytes: size.
        owner, kind: whose it is and for what, in plans and reports.
        leased: whether there is memory now.
    """

    def __init__(self, nbytes: int, device: torch.device, kind: str = "", owner: Owner | None = None) -> None:
        self.nbytes = nbytes
        self.device = device
        self.kind = kind
        self.owner: Owner = owner if owner is not None else Owner()
        self.owner.slabs.add(self)
        self.leased: bool = False
        self._lender: Allocator = DYNAMIC  #: of the memory there is now
        self._storage = torch.UntypedStorage(0, device=device)
        self._lease_memory: torch.Tensor | None = None  #: an allocator's memory, while leased from it
        #: A storage over the memory that was given last, kept where the next lease brings the same, and its address.
        self._block: torch.UntypedStorage | None = None
        self._block_address = 0
        self._attached: torch.UntypedStorage | None = None
        self._poison = os.environ.get("SHARDWRIGHT_POISON") == "1"

    @property
    def unit(self) -> str:
        return self.owner.name

    @property
    def address(self) -> int:
        """Where the memory lies now; 0 while released."""
        return self._storage.data_ptr()

    def lease(self) -> None:
        """Attach memory, contents undefined. Made on the current stream of the device."""
        if self.leased:
            return
        self._lender = self.owner.allocator
        memory = self._lender.lease(self)
        if memory is None:
            self._block = None
            if self._storage.nbytes() != self.nbytes:
                self._storage.resize_(self.nbytes)
        else:
            self._attach(memory)
        self.leased = True

    def _attach(self, memory: torch.Tensor) -> None:
        if not isinstance(memory, torch.Tensor):
            raise TypeError(
                f"{self._lender_name()}.lease returned {memory!r} ({type(memory).__name__}) for {self.nbytes} bytes "
                f"of unit {self.unit!r}; it must return a uint8 tensor, or None for torch's allocator"
            )
        address = memory.data_ptr()
        if memory.nbytes < self.nbytes or memory.device != self.device or address % 16:
            raise ValueError(
                f"{self._lender_name()}.lease returned {memory.nbytes} bytes at address {address:#x} on "
                f"{memory.device} for {self.nbytes} bytes of unit {self.unit!r} on {self.device}; it must return at "
                "least as many bytes on the same device, at a multiple of 16"
            )
        if self._storage.nbytes():  # left by a poisoned release
            self._storage.resize_(0)
        if self._block is None or self._block_address != address:
            self._block, self._block_address = block_of(memory, self.nbytes), address
        swap_memory(self._storage, self._block)
        self._lease_memory, self._attached = memory, self._block

    def _lender_name(self) -> str:
        lender = getattr(self._lender, "inner", self._lender)  # a recorder stands before the user's
        return type(lender).__name__

    def release(self) -> None:
        """Give the memory back. On CUDA the current stream must be ordered after every use of it."""
        if not self.leased:
            return
        self.leased = False
        if self._attached is not None:
            if self._poison:
                self._storage.fill_(255)  # type: ignore[attr-defined]
            block, memory = self._attached, self._lease_memory
            assert memory is not None
            self._attached = self._lease_memory = None
            swap_memory(self._storage, block)
            if not self._lender.release(self, memory):
                self._block = None  # which would keep the memory
            if self._poison:  # a read must find NaN, where a storage without memory would crash the process
                self._storage.resize_(self.nbytes)
                self._storage.fill_(255)  # type: ignore[attr-defined]
            return
        if self._poison:
            self._storage.fill_(255)  # type: ignore[attr-defined]
        elif self._storage.resizable():  # not while numpy shares it
            self._storage.resize_(0)
        self._lender.release(self, None)

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
