"""Deferred construction: models built without memory, and initialised straight into shards.

    with sw.deferred_init():
        model = Model(config)
    for block in model.layers:
        sw.fully_shard(block)
    sw.fully_shard(model)
    sw.materialize(model)

Units, slabs and collectives are the engine's; nothing here communicates.
"""

from shardwright.init.context import deferred_init
from shardwright.init.delivery import materialize
from shardwright.init.recorder import value_of

__all__ = ["deferred_init", "materialize", "value_of"]
