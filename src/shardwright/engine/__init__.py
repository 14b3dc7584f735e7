"""The sharding engine: ``fully_shard`` and what happens in the hooks it installs."""

import shardwright.engine.ragged_ops  # noqa: F401  # fills the table of operations on ragged tensors
from shardwright.engine.api import fully_shard
from shardwright.engine.find import ShardPlacementResult
from shardwright.engine.graphed import GraphedStep
from shardwright.engine.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwright.engine.offload import Offload
from shardwright.engine.precision import PrecisionPolicy
from shardwright.engine.replace import replace_torch
from shardwright.engine.report import MemoryReport, memory_report
from shardwright.engine.whole import unsharded

__all__ = [
    "FSDPModule",
    "GraphedStep",
    "MemoryReport",
    "Offload",
    "PrecisionPolicy",
    "ShardPlacementResult",
    "UnshardHandle",
    "fully_shard",
    "memory_report",
    "register_fsdp_forward_method",
    "replace_torch",
    "share_comm_ctx",
    "unsharded",
]
