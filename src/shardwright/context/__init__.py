"""Context parallelism: ranks that each have a part of every sample, and attention over the whole of it.

``split`` has the ranks and their parts of samples, ``rows`` the collectives and ``exchange`` the movements of heads and
tokens. ``attending`` computes on what these bring together. ``modules`` makes it the attention of a module. Rule: a
model with other layers that mix tokens exchanges for itself; nothing here knows a layer.
"""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.context.attending import attention as attention
    from shardwright.context.modules import context_parallel as context_parallel
    from shardwright.context.split import (
        Split as Split,
        current as current,
        gather as gather,
        positions as positions,
        shard as shard,
        whole_samples as whole_samples,
    )

# For other rooms of the package.
if TYPE_CHECKING:
    from shardwright.context.attending import Part, attend_part, exchanged, visible
    from shardwright.context.exchange import copies_of_heads, repeated, to_heads, to_tokens
    from shardwright.context.rows import RowExchange

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
