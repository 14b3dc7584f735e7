"""Memory that the engine leases for a while. Knows bytes and devices, nothing of parameters or ranks."""

from shardwright.memory.slab import Slab

__all__ = ["Slab"]
