"""Registries of values that have a name: strategies, layouts, memories and stores. Nothing here imports torch.

``shardwright.extend`` has what programs of users register. ``registry`` is the mechanism, which the trainer uses for
its own names, too.
"""

from shardwright.engine.extend.named_layouts import NamedLayout, layouts
from shardwright.engine.extend.named_memories import NamedMemory, memories
from shardwright.engine.extend.named_strategies import NamedStrategy, resolve, strategies
from shardwright.engine.extend.registry import (
    ExtensionError,
    Named,
    Registry,
    call,
    check_signature,
    import_value,
    in_words,
)
from shardwright.engine.extend.store_registry import NEEDED, stores
