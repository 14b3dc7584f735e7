"""Optimizers and gradient clipping over local shards."""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.optim.adamw8bit import AdamW8bit as AdamW8bit, chunks_of_devices as chunks_of_devices
    from shardwright.optim.clip import (
        ParameterNorms as ParameterNorms,
        clip_finite_grad_norm_ as clip_finite_grad_norm_,
        clip_finite_with_units as clip_finite_with_units,
        clip_grad_norm_ as clip_grad_norm_,
    )
    from shardwright.optim.companion import ShardedCompanion as ShardedCompanion
    from shardwright.optim.in_backward import in_backward as in_backward
    from shardwright.optim.muon import Muon as Muon
    from shardwright.optim.needs import Needs as Needs
    from shardwright.optim.sharded import fully_shard_optimizer as fully_shard_optimizer
    from shardwright.optim.updates import Updates as Updates
    from shardwright.optim.whole_state import mapped as mapped

__all__, __getattr__, __dir__ = door(__spec__)
