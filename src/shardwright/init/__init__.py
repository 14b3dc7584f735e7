"""Deferred construction: models built without memory, and initialised straight into shards.

    with sw.deferred_init():
        model = Model(config)
    for block in model.layers:
        sw.fully_shard(block)
    sw.fully_shard(model)
    sw.materialize(model)

Units, slabs and collectives are the engine's; nothing here communicates.
"""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.init.context import deferred_init as deferred_init
    from shardwright.init.delivery import (
        become as become,
        materialize as materialize,
        refuse_graphs as refuse_graphs,
    )
    from shardwright.init.recorder import DeferredTensor as DeferredTensor, value_of as value_of
    from shardwright.init.truncated import drawn_by as drawn_by, draws_one_piece as draws_one_piece

__all__, __getattr__, __dir__ = door(__spec__)
