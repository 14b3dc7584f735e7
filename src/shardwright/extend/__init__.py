"""Names for values of your own: strategies, layouts, memory.

    from shardwright.extend import NamedStrategy, strategies

    strategies.add(NamedStrategy("zero2_inside", (0, 2), "Replicas outside, ZeRO-2 inside each."))

Optimizers, kinds of models and places for metrics belong to the trainer: ``shardwright.train.extend``. Nothing here
imports torch.
"""

from shardwright.extend.layouts import NamedLayout, layouts
from shardwright.extend.memories import NamedMemory, memories
from shardwright.extend.registry import ExtensionError, Named, Registry
from shardwright.extend.strategies import NamedStrategy, strategies

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
