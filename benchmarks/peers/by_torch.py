"""torch's own engines: the plain model, DDP, DDP with ZeroRedundancyOptimizer, FSDP1 and FSDP2."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.shapes import blocks_of, loss_of
from benchmarks.peers.step import CLIP, Step, adamw_options

Clip = Callable[[], Any]


def training(model: nn.Module, optimizer: Any, clip: Clip) -> Step:
    """The loop of a user, on any engine that keeps torch's."""

    def step(tokens: Tensor, weight: float) -> tuple[Any, Any]:
        loss = loss_of(model, tokens) * weight
        loss.backward()
        norm = clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def torch_clip(model: nn.Module) -> Clip:
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def plain(model: nn.Module, adamw: str) -> Step:
    """Each process trains its own model on its own data. Nothing is communicated: no engine can be faster."""
    return training(model, torch.optim.AdamW(model.parameters(), **adamw_options(adamw)), torch_clip(model))


def _replicated(model: nn.Module) -> DistributedDataParallel:
    # The only buffers are constant tables. torch 2.13 renamed the option that broadcasts them.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    no_broadcast = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {no_broadcast: False}
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **options)


def ddp(model: nn.Module, adamw: str) -> Step:
    return plain(_replicated(model), adamw)


def ddp_zero(model: nn.Module, adamw: str) -> Step:
    model = _replicated(model)
    options = adamw_options(adamw)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, **options)
    return training(model, optimizer, torch_clip(model))


def fsdp1(model: nn.Module, adamw: str) -> Step:
    policy = ModuleWrapPolicy({type(block) for block in blocks_of(model)})
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    optimizer = torch.optim.AdamW(sharded.parameters(), **adamw_options(adamw))
    return training(sharded, optimizer, lambda: sharded.clip_grad_norm_(CLIP))


def fsdp2(model: nn.Module, adamw: str) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*blocks_of(model), model):
        fully_shard(unit, mesh=mesh)
    return plain(model, adamw)
