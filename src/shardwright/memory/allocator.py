"""Where slabs get their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from shardwright.memory.slab import Slab


@runtime_checkable
class Allocator(Protocol):
    """Gives slabs their memory. ``fully_shard(root, memory=...)`` takes any object with these two methods.

    Both are called on the host, in the order of the program, with the device's current stream being the one on which
    the memory will first be used, or was last. A slab has ``nbytes``, ``device``, ``unit`` (a name) and ``kind``.
    """

    def lease(self, slab: Slab) -> torch.Tensor | None:
        """Memory for a slab until :meth:`release`: a contiguous uint8 tensor of ``slab.nbytes`` bytes or more on
        ``slab.device``, at an address that is a multiple of 16, which no other lease has meanwhile. None: it is taken
        from torch's allocator.
        """

    def release(self, slab: Slab, memory: torch.Tensor | None) -> bool | None:
        """The slab needs what :meth:`lease` returned no longer.

        True: the slab's next lease will mostly bring the same, so what the engine has made for it may be kept.
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
