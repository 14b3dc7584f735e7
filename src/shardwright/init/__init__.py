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
    from shardwright.init.delivery import materialize as materialize
    from shardwright.init.recorder import value_of as value_of

# For other rooms of the package.
if TYPE_CHECKING:
    from shardwright.init.delivery import become, refuse_graphs
    from shardwright.init.recorder import DeferredTensor
    from shardwright.init.truncated import draws_one_piece

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
