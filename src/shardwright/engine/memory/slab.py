"""Slabs: storages that lose and get memory while their views stay; and the protocol of allocators.

A slab's storage object and its views are made once. A lease gives the storage memory, a release removes it. Autograd
compares storages, not addresses. So a view that autograd has saved is right again after the next lease.

A slab that a collective fills has a second storage, the landing storage, which only the collective's views see. While
the collective runs, the landing storage has the memory, so nobody can read memory that is only partly written.
:meth:`Slab.reveal` gives it back when the collective has arrived.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch

from shardwright.engine.compat.storages import SWAPS_MEMORY, block_of, storage_key, swap_memory


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
    """Gives memory of a special kind, such as memory that the network reads and writes directly.

    Attributes:
        kinds: kinds of slabs that need it; None: all kinds.
    """

    kinds: frozenset[str] | None

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 tensor of ``nbytes`` bytes."""


class Observer(Protocol):
    """Sees the memory that the engine takes and gives back: a simulator of a device, or a plan.

    The host calls it in the order of the program. The stream that uses the memory is then current.
    """

    def leased(self, slab: Slab) -> None:
        """A slab has memory now."""

    def releases(self, slab: Slab) -> None:
        """A slab is about to give its memory back."""

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """A storage is about to get another size: of a slab that takes memory from torch's allocator, or of a tensor
        that the engine frees."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has its new size."""

    def exchanged(self, one: torch.UntypedStorage, two: torch.UntypedStorage) -> None:
        """Two storages of a slab have exchanged their memory."""


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
    if not observers:
        storage.resize_(nbytes)
        return
    for observer in observers:
        observer.resizes(storage, nbytes)
    storage.resize_(nbytes)
    for observer in observers:
        observer.resized(storage)


class Dynamic:
    """Leases from torch's allocator, or from the source of the slab's owner."""

    def lease(self, slab: Slab) -> torch.Tensor | None:
        source = slab.owner.source
        if source is None or not slab.nbytes or (source.kinds is not None and slab.kind not in source.kinds):
            return None
        return source.take(slab.nbytes, slab.device)

    def release(self, slab: Slab, memory: torch.Tensor | None) -> None:
        return None


DYNAMIC = Dynamic()


class Owner:
    """The owner of slabs. It says which allocator their next leases use, and which kind of memory they need."""

    __slots__ = ("allocator", "name", "slabs", "source")

    def __init__(self, name: str = "", allocator: Allocator = DYNAMIC) -> None:
        self.name: str = name
        self.allocator: Allocator = allocator
        self.source: Source | None = None
        self.slabs: weakref.WeakSet[Slab] = weakref.WeakSet()


#: The slabs of this process by the keys of their storages.
_slabs: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()


def slab_of(tensor: torch.Tensor) -> Slab | None:
    """Return the slab of whose storage a plain tensor is a view, also while the slab has no memory; None: of none."""
    key = storage_key(tensor)
    slab = _slabs.get(key)
    # A slab of the host's memory gets another storage, so an old key may belong to something else now.
    return slab if slab is not None and storage_key(slab._storage) == key else None


def released_slabs(kind: str) -> list[Slab]:
    """Return the slabs of a kind that have a size, and now no memory that their views see."""
    found = [slab for slab in list(_slabs.values()) if slab.kind == kind and slab.nbytes]
    return [slab for slab in found if not (slab.leased and slab.revealed)]


def is_in_slab(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor is a view of a slab's storage, also while the slab has no memory."""
    return slab_of(tensor) is not None


class Slab:
    """Memory of one unit, leased and released.

    Attributes:
        nbytes: size.
        owner, kind: its owner and its use, for plans and reports.
        leased: whether it has memory now.
    """

    def __init__(self, nbytes: int, device: torch.device, kind: str = "", owner: Owner | None = None) -> None:
        self.nbytes = nbytes
        self.device = device
        self.kind = kind
        self.owner: Owner = owner if owner is not None else Owner()
        self.owner.slabs.add(self)
        self.leased: bool = False
        self._lender: Allocator = DYNAMIC  #: the allocator of its present memory
        self._storage = torch.UntypedStorage(0, device=device)
        _slabs[storage_key(self._storage)] = self
        #: Has the memory from a lease until :meth:`reveal`; None: nothing fills the slab through landing views.
        self._landing: torch.UntypedStorage | None = None
        self._lease_memory: torch.Tensor | None = None  #: an allocator's memory, while leased from it
        #: A storage over the memory of the last lease, and its address. Kept if the next lease returns the same memory.
        self._block: torch.UntypedStorage | None = None
        self._block_address = 0
        self._attached: torch.UntypedStorage | None = None
        self._poison = os.environ.get("SHARDWRIGHT_POISON") == "1"

    @property
    def unit(self) -> str:
        return self.owner.name

    @property
    def address(self) -> int:
        """The address of its memory now; 0 while released."""
        return (self._storage if self.revealed else self._landing).data_ptr()  # type: ignore[union-attr]

    @property
    def revealed(self) -> bool:
        """Whether views that :meth:`view` made see the memory of the present lease."""
        return self._landing is None or not self._landing.nbytes()

    def lease(self) -> None:
        """Attach memory with undefined content, on the device's current stream.

        If the slab has a landing storage, its memory is hidden there until :meth:`reveal`. So is the memory of a slab
        that is leased already, because it will be filled again.
        """
        if self.leased:
            self._hide()
            return
        if self._block is not None and not self._block.nbytes():
            # An exception, as of a signal's handler, came between two lines of an earlier lease or release.
            swap_memory(self._storage, self._block)
            self._attached = self._lease_memory = None
        self._lender = self.owner.allocator
        memory = self._lender.lease(self)
        if memory is None:
            self._block = None
            if self._storage.nbytes() != self.nbytes:
                resize(self._storage, self.nbytes)
        else:
            self._attach(memory)
        self.leased = True
        for observer in observers:
            observer.leased(self)
        self._hide()

    def _hide(self) -> None:
        landing = self._landing
        if landing is None or landing.nbytes():
            return
        if self._poison or (self._attached is None and not self._storage.resizable()):
            resize(
                landing, self.nbytes
            )  # the other memory stays: for reads of NaN, or because numpy shares it
            if self._poison:
                self._storage.fill_(255)  # type: ignore[attr-defined]
        else:
            self._exchange(landing)

    def reveal(self) -> None:
        """Show the leased memory to the views that :meth:`view` made. Does nothing if they see it already."""
        landing = self._landing
        if landing is None or not landing.nbytes():
            return
        if self._storage.nbytes():
            self._storage.copy_(landing)
            resize(landing, 0)
        else:
            self._exchange(landing)

    def _exchange(self, landing: torch.UntypedStorage) -> None:
        swap_memory(self._storage, landing)
        for observer in observers:
            observer.exchanged(self._storage, landing)

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
            resize(self._storage, 0)
        if self._block is None or self._block_address != address:
            self._block, self._block_address = block_of(memory, self.nbytes), address
        swap_memory(self._storage, self._block)
        self._lease_memory, self._attached = memory, self._block

    def _lender_name(self) -> str:
        lender = getattr(self._lender, "inner", self._lender)  # inside a recorder is the user's allocator
        return type(lender).__name__

    def release(self) -> None:
        """Release the memory. On CUDA the current stream must be ordered after every use of it."""
        if not self.leased:
            return
        for observer in observers:
            observer.releases(self)
        self.reveal()
        self.leased = False
        if self._attached is not None:
            if self._poison:
                self._storage.fill_(255)  # type: ignore[attr-defined]
            block, memory = self._attached, self._lease_memory
            assert memory is not None
            self._attached = self._lease_memory = None
            swap_memory(self._storage, block)
            if not self._lender.release(self, memory):
                self._block = None  # it would keep the memory alive
            if self._poison and self._storage.resizable():
                # Reads must get NaN; without memory they would crash the process.
                resize(self._storage, self.nbytes)
                self._storage.fill_(255)  # type: ignore[attr-defined]
            return
        if self._poison:
            self._storage.fill_(255)  # type: ignore[attr-defined]
        elif self._storage.resizable():  # not while numpy shares it
            resize(self._storage, 0)
        self._lender.release(self, None)

    def view(
        self, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return a tensor over the slab, ``offset`` in elements of ``dtype``. Make it while the slab is leased; it
        stays valid."""
        return _view(self._storage, dtype, offset, size, stride)

    def byte_view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` bytes from byte ``offset`` as uint8."""
        return self.view(torch.uint8, offset, (nbytes,), (1,))

    @contextmanager
    def landing(self) -> Iterator[None]:
        """Inside the context, make the views through which the slab is filled, with :meth:`landing_view`.

        From then on a lease hides the memory from all other views until :meth:`reveal`. On torch 2.11, where memory
        cannot move, the other views see it at once.
        """
        if not SWAPS_MEMORY:
            yield
            return
        if self._landing is None:
            self._landing = torch.UntypedStorage(0, device=self.device)
        if self.leased:
            self._hide()
        else:
            resize(self._landing, self.nbytes)
        try:
            yield
        finally:
            if self.leased:
                self.reveal()
            else:
                resize(self._landing, 0)

    def landing_view(self, dtype: torch.dtype, offset: int, size: Sequence[int]) -> torch.Tensor:
        """Return a contiguous tensor over the memory between a lease and :meth:`reveal`, ``offset`` in elements."""
        return _view(self._landing if self._landing is not None else self._storage, dtype, offset, size)


def _view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int] | None = None,
) -> torch.Tensor:
    if stride is None:
        stride = torch.empty(0, dtype=dtype, device="meta").new_empty(tuple(size)).stride()
    return torch.empty(0, dtype=dtype, device=storage.device).set_(
        storage, offset, tuple(size), tuple(stride)
    )
