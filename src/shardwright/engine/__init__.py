"""The sharding engine: ``fully_shard`` and what happens in the hooks it installs."""

from shardwright.engine.api import FSDPModule, UnshardHandle, fully_shard

__all__ = ["FSDPModule", "UnshardHandle", "fully_shard"]
