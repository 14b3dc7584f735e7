"""Names for values of your own: strategies, layouts and memories.

    from shardwright.extend import NamedStrategy, strategies

    strategies.add(NamedStrategy("zero2_inside", (0, 2), "Replicas outside, ZeRO-2 inside each."))

Optimizers, kinds of models and places for metrics belong to the trainer: ``shardwright.train.extend``. Nothing here
imports torch.
"""

from shardwright.engine.extend import (
    ExtensionError as ExtensionError,
    Named as Named,
    NamedLayout as NamedLayout,
    NamedMemory as NamedMemory,
    NamedStrategy as NamedStrategy,
    Registry as Registry,
    layouts as layouts,
    memories as memories,
    strategies as strategies,
)
