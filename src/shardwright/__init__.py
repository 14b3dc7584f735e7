"""Fully sharded training of PyTorch models that do not fit on one device.

    import shardwright as sw

    for block in model.layers:
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))

The engine imports torch and nothing else. The trainer (``shardwright train``) needs the extra ``train``.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

from shardwright.engine import FSDPModule, UnshardHandle, fully_shard
from shardwright.optim import clip_grad_norm_, fully_shard_optimizer

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "fully_shard_optimizer",
]
