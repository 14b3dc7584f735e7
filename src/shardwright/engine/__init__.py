"""The sharding engine: ``fully_shard`` and what happens in the hooks it installs."""

import shardwright.engine.tensors.ragged_ops  # noqa: F401  # fills the table of operations on ragged tensors
from shardwright.engine.assembly.find import ShardPlacementResult
from shardwright.engine.base.offload import Offload
from shardwright.engine.base.precision import PrecisionPolicy
from shardwright.engine.front.api import fully_shard
from shardwright.engine.front.corruption import (
    Difference,
    GradientHashes,
    compare_copies,
    compare_gradients,
    hash_gradients,
)
from shardwright.engine.front.describe import Description, describe
from shardwright.engine.front.graphed import GraphedStep
from shardwright.engine.front.methods import register_fsdp_forward_method
from shardwright.engine.front.module import FSDPModule, UnshardHandle, share_comm_ctx
from shardwright.engine.front.replace import replace_torch
from shardwright.engine.front.report import MemoryReport, memory_report
from shardwright.engine.front.whole import unsharded

__all__ = [
    "Description",
    "Difference",
    "FSDPModule",
    "GradientHashes",
    "GraphedStep",
    "MemoryReport",
    "Offload",
    "PrecisionPolicy",
    "ShardPlacementResult",
    "UnshardHandle",
    "compare_copies",
    "compare_gradients",
    "describe",
    "fully_shard",
    "hash_gradients",
    "memory_report",
    "register_fsdp_forward_method",
    "replace_torch",
    "share_comm_ctx",
    "unsharded",
]
