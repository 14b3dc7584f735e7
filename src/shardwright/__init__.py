"""Fully sharded training of PyTorch models that do not fit on one device.

    import shardwright as sw

    for block in model.layers:
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))

The engine imports torch and nothing else. The trainer (``shardwright train``) needs the extra ``train``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwright._version import __version__ as __version__

if TYPE_CHECKING:
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
    )

    from shardwright import comm_hooks, context, optim
    from shardwright.activations.causal_lm import chunk_causal_lm_loss
    from shardwright.activations.chunked_loss import chunked_cross_entropy
    from shardwright.activations.offload import offload_activations
    from shardwright.checkpoint import (
        AsyncCheckpoint,
        load_checkpoint,
        load_pretrained,
        open_checkpoint,
        receive_weights,
        save_checkpoint,
        save_pretrained,
        stream_weights,
    )
    from shardwright.context import context_parallel
    from shardwright.engine import (
        Description,
        Difference,
        FSDPModule,
        GradientHashes,
        GraphedStep,
        MemoryReport,
        Offload,
        PrecisionPolicy,
        ShardPlacementResult,
        UnshardHandle,
        compare_copies,
        compare_gradients,
        describe,
        fully_shard,
        hash_gradients,
        layout,
        memory_report,
        register_fsdp_forward_method,
        replace_torch,
        share_comm_ctx,
        unsharded,
    )
    from shardwright.engine.front import wrap
    from shardwright.engine.layout import Ragged, Strategy
    from shardwright.engine.memory import Allocator
    from shardwright.init import deferred_init, materialize
    from shardwright.optim import AdamW8bit, Muon, clip_grad_norm_, fully_shard_optimizer
    from shardwright.planner.tracing.loop import plan
    from shardwright.planner.verdict import Verdict
    from shardwright.watching.api import Watch, watch
    from shardwright.watching.profiling import Profiler, profiler

__all__ = [
    "AdamW8bit",
    "Allocator",
    "AsyncCheckpoint",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Description",
    "Difference",
    "FSDPModule",
    "GradientHashes",
    "GraphedStep",
    "MemoryReport",
    "MixedPrecisionPolicy",
    "Muon",
    "Offload",
    "OffloadPolicy",
    "PrecisionPolicy",
    "Profiler",
    "Ragged",
    "ShardPlacementResult",
    "Strategy",
    "UnshardHandle",
    "Verdict",
    "Watch",
    "chunk_causal_lm_loss",
    "chunked_cross_entropy",
    "clip_grad_norm_",
    "comm_hooks",
    "compare_copies",
    "compare_gradients",
    "context",
    "context_parallel",
    "deferred_init",
    "describe",
    "fully_shard",
    "fully_shard_optimizer",
    "hash_gradients",
    "layout",
    "load_checkpoint",
    "load_pretrained",
    "materialize",
    "memory_report",
    "offload_activations",
    "open_checkpoint",
    "optim",
    "plan",
    "profiler",
    "receive_weights",
    "register_fsdp_forward_method",
    "replace_torch",
    "save_checkpoint",
    "save_pretrained",
    "share_comm_ctx",
    "stream_weights",
    "unsharded",
    "watch",
    "wrap",
]

_MODULES = {
    "comm_hooks": "shardwright.comm_hooks",
    "context": "shardwright.context",
    "layout": "shardwright.engine.layout",
    "optim": "shardwright.optim",
    "wrap": "shardwright.engine.front.wrap",
}

#: Public name -> the module that defines it. Imported at first use, so that the command line starts without torch.
_HOMES = {
    "AdamW8bit": "shardwright.optim",
    "Allocator": "shardwright.engine.memory",
    "AsyncCheckpoint": "shardwright.checkpoint",
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "DataParallelMeshDims": "shardwright.engine.compat.private",
    "Description": "shardwright.engine",
    "Difference": "shardwright.engine",
    "FSDPModule": "shardwright.engine",
    "GradientHashes": "shardwright.engine",
    "GraphedStep": "shardwright.engine",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "Muon": "shardwright.optim",
    "Offload": "shardwright.engine",
    "OffloadPolicy": "torch.distributed.fsdp",
    "PrecisionPolicy": "shardwright.engine",
    "Profiler": "shardwright.watching.profiling",
    "Ragged": "shardwright.engine.layout",
    "ShardPlacementResult": "shardwright.engine",
    "Strategy": "shardwright.engine.layout",
    "UnshardHandle": "shardwright.engine",
    "chunk_causal_lm_loss": "shardwright.activations.causal_lm",
    "chunked_cross_entropy": "shardwright.activations.chunked_loss",
    "clip_grad_norm_": "shardwright.optim",
    "compare_copies": "shardwright.engine",
    "compare_gradients": "shardwright.engine",
    "context_parallel": "shardwright.context",
    "deferred_init": "shardwright.init",
    "describe": "shardwright.engine",
    "fully_shard": "shardwright.engine",
    "fully_shard_optimizer": "shardwright.optim",
    "hash_gradients": "shardwright.engine",
    "load_checkpoint": "shardwright.checkpoint",
    "load_pretrained": "shardwright.checkpoint",
    "materialize": "shardwright.init",
    "MemoryReport": "shardwright.engine",
    "memory_report": "shardwright.engine",
    "register_fsdp_forward_method": "shardwright.engine",
    "replace_torch": "shardwright.engine",
    "offload_activations": "shardwright.activations.offload",
    "open_checkpoint": "shardwright.checkpoint",
    "receive_weights": "shardwright.checkpoint",
    "save_checkpoint": "shardwright.checkpoint",
    "save_pretrained": "shardwright.checkpoint",
    "share_comm_ctx": "shardwright.engine",
    "stream_weights": "shardwright.checkpoint",
    "unsharded": "shardwright.engine",
    "plan": "shardwright.planner.tracing.loop",
    "profiler": "shardwright.watching.profiling",
    "Verdict": "shardwright.planner.verdict",
    "Watch": "shardwright.watching.api",
    "watch": "shardwright.watching.api",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
