"""Names for values of your own: strategies, layouts, memory.

    from shardwright.engine.extend import NamedStrategy, strategies

    strategies.add(NamedStrategy("zero2_inside", (0, 2), "Replicas outside, ZeRO-2 inside each."))

Optimizers, kinds of models and places for metrics belong to the trainer: ``shardwright.train.extend``. Nothing here
imports torch.
"""

from shardwright.engine.extend.layouts import NamedLayout, layouts
from shardwright.engine.extend.memories import NamedMemory, memories
from shardwright.engine.extend.registry import ExtensionError, Named, Registry
from shardwright.engine.extend.strategies import NamedStrategy, strategies

__all__ = [
    "ExtensionError",
    "Named",
    "NamedLayout",
    "NamedMemory",
    "NamedStrategy",
    "Registry",
    "layouts",
    "memories",
    "strategies",
]
