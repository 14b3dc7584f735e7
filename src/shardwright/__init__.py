"""Fully sharded training of PyTorch models that do not fit on one device.

    import shardwright as sw

    for block in model.layers:
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))

The engine imports torch and nothing else. The trainer (``shardwright train``) needs the extra ``train``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.common.doors import door
from shardwright.common.package import __version__ as __version__

if TYPE_CHECKING:
    from torch.distributed.fsdp import (
        CPUOffloadPolicy as CPUOffloadPolicy,
        MixedPrecisionPolicy as MixedPrecisionPolicy,
        OffloadPolicy as OffloadPolicy,
    )

    from shardwright import comm_hooks as comm_hooks, context as context, optim as optim
    from shardwright.activations import (
        chunk_causal_lm_loss as chunk_causal_lm_loss,
        chunked_cross_entropy as chunked_cross_entropy,
        offload_activations as offload_activations,
    )
    from shardwright.checkpoint import (
        AsyncCheckpoint as AsyncCheckpoint,
        load_checkpoint as load_checkpoint,
        load_pretrained as load_pretrained,
        open_checkpoint as open_checkpoint,
        receive_weights as receive_weights,
        save_checkpoint as save_checkpoint,
        save_pretrained as save_pretrained,
        stream_weights as stream_weights,
    )
    from shardwright.context import context_parallel as context_parallel
    from shardwright.engine import (
        Description as Description,
        Difference as Difference,
        FSDPModule as FSDPModule,
        GradientHashes as GradientHashes,
        GraphedStep as GraphedStep,
        MemoryReport as MemoryReport,
        Offload as Offload,
        PrecisionPolicy as PrecisionPolicy,
        ShardPlacementResult as ShardPlacementResult,
        UnshardHandle as UnshardHandle,
        compare_copies as compare_copies,
        compare_gradients as compare_gradients,
        describe as describe,
        fully_shard as fully_shard,
        hash_gradients as hash_gradients,
        layout as layout,
        memory_report as memory_report,
        register_fsdp_forward_method as register_fsdp_forward_method,
        replace_torch as replace_torch,
        share_comm_ctx as share_comm_ctx,
        unsharded as unsharded,
        wrap as wrap,
    )
    from shardwright.engine.compat import DataParallelMeshDims as DataParallelMeshDims
    from shardwright.engine.layout import Ragged as Ragged, Strategy as Strategy
    from shardwright.engine.memory import Allocator as Allocator
    from shardwright.init import deferred_init as deferred_init, materialize as materialize
    from shardwright.optim import (
        AdamW8bit as AdamW8bit,
        Muon as Muon,
        clip_grad_norm_ as clip_grad_norm_,
        fully_shard_optimizer as fully_shard_optimizer,
    )
    from shardwright.planner import Verdict as Verdict
    from shardwright.planner.tracing import plan as plan
    from shardwright.watching import (
        Profiler as Profiler,
        Watch as Watch,
        profiler as profiler,
        watch as watch,
    )

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
