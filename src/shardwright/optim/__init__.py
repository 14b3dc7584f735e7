"""Optimizers and gradient clipping over local shards."""

from shardwright.optim.adamw8bit import AdamW8bit
from shardwright.optim.clip import clip_grad_norm_
from shardwright.optim.in_backward import in_backward
from shardwright.optim.muon import Muon
from shardwright.optim.sharded import fully_shard_optimizer
from shardwright.optim.updates import Updates

__all__ = ["AdamW8bit", "Muon", "Updates", "clip_grad_norm_", "fully_shard_optimizer", "in_backward"]
