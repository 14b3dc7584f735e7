"""Optimizers and gradient clipping over local shards."""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.optim.adamw8bit import AdamW8bit as AdamW8bit
    from shardwright.optim.backward_steps import in_backward as in_backward
    from shardwright.optim.clip import clip_grad_norm_ as clip_grad_norm_
    from shardwright.optim.muon import Muon as Muon
    from shardwright.optim.sharded import fully_shard_optimizer as fully_shard_optimizer
    from shardwright.optim.whole.updates import Updates as Updates

# For other rooms of the package.
if TYPE_CHECKING:
    from shardwright.optim.adamw8bit import chunks_of_devices
    from shardwright.optim.clip import ParameterNorms, clip_finite_grad_norm_
    from shardwright.optim.companion import ShardedCompanion
    from shardwright.optim.needs import Needs
    from shardwright.optim.whole.state import mapped

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
