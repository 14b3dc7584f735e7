"""Memory that the engine leases during a step. This package knows bytes and devices, but no parameters or ranks."""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.engine.memory.packing import pack as pack
    from shardwright.engine.memory.plan import Item as Item, Plan as Plan, peak as peak, slots as slots
    from shardwright.engine.memory.planned import Planned as Planned
    from shardwright.engine.memory.slab import (
        DYNAMIC as DYNAMIC,
        Allocator as Allocator,
        Dynamic as Dynamic,
        Observer as Observer,
        Owner as Owner,
        Slab as Slab,
        Source as Source,
        is_in_slab as is_in_slab,
        observe as observe,
        released_slabs as released_slabs,
        resize as resize,
        slab_of as slab_of,
    )
    from shardwright.engine.memory.trace import LeaseRecorder as LeaseRecorder

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
