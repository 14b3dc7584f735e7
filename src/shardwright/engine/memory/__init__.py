"""Memory that the engine leases during a step. This package knows bytes and devices, but no parameters or ranks."""

from shardwright.engine.memory.packing import pack
from shardwright.engine.memory.plan import Item, Plan, peak, slots
from shardwright.engine.memory.planned import Planned
from shardwright.engine.memory.slab import (
    DYNAMIC,
    Allocator,
    Dynamic,
    Observer,
    Owner,
    Slab,
    Source,
    is_in_slab,
    observe,
    released_slabs,
    resize,
    slab_of,
)
from shardwright.engine.memory.trace import Recorder

__all__ = [
    "DYNAMIC",
    "Allocator",
    "Dynamic",
    "Item",
    "Observer",
    "Owner",
    "Plan",
    "Planned",
    "Recorder",
    "Slab",
    "Source",
    "is_in_slab",
    "observe",
    "pack",
    "peak",
    "released_slabs",
    "resize",
    "slab_of",
    "slots",
]
