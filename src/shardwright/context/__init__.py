"""Context parallelism: ranks that each have a part of every sample, and attention over the whole of it.

``split`` has the ranks and their parts of samples, ``rows`` the collectives and ``exchange`` the movements of heads and
tokens. ``attending`` computes on what these bring together. ``modules`` makes it the attention of a module. Rule: a
model with other layers that mix tokens exchanges for itself; nothing here knows a layer.
"""

from shardwright.context.attending import attention
from shardwright.context.modules import context_parallel
from shardwright.context.split import Split, current, gather, positions, shard, whole_samples

__all__ = [
    "Split",
    "attention",
    "context_parallel",
    "current",
    "gather",
    "positions",
    "shard",
    "whole_samples",
]
