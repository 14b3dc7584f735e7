"""The sharding engine: ``fully_shard`` and what happens in the hooks it installs."""

from shardwright.engine.api import fully_shard
from shardwright.engine.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)

__all__ = [
    "FSDPModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
