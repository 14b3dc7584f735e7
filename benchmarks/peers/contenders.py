"""The engines that are compared, and what each of them cuts over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from benchmarks.peers import by_torch
from benchmarks.peers.by_deepspeed import deepspeed
from benchmarks.peers.by_megatron import megatron_fsdp
from benchmarks.peers.by_shardwright import shardwright
from benchmarks.peers.step import Step


@dataclass(frozen=True)
class Contender:
    """How to make a step of the plain model, and the ZeRO stage that says what is sharded.

    Stage 0 shards nothing, 1 the optimizer's state, 2 gradients as well, 3 parameters as well.
    """

    build: Callable[[nn.Module, str], Step]
    stage: int
    package: str = "torch"
    communicates: bool = True


BASE = "FSDP2"
PLAIN = "plain torch"

CONTENDERS = {
    PLAIN: Contender(by_torch.plain, 0, communicates=False),
    "DDP": Contender(by_torch.ddp, 0),
    "DDP + ZeroRedundancyOptimizer": Contender(by_torch.ddp_zero, 1),
    "FSDP1": Contender(by_torch.fsdp1, 3),
    BASE: Contender(by_torch.fsdp2, 3),
    "DeepSpeed ZeRO-1": Contender(deepspeed(1), 1, "deepspeed"),
    "DeepSpeed ZeRO-2": Contender(deepspeed(2), 2, "deepspeed"),
    "DeepSpeed ZeRO-3": Contender(deepspeed(3), 3, "deepspeed"),
    "DeepSpeed ZeRO-3, its defaults": Contender(deepspeed(3, defaults=True), 3, "deepspeed"),
    "Megatron-FSDP": Contender(megatron_fsdp, 3, "megatron-fsdp"),
    "Shardwright ddp": Contender(shardwright("ddp"), 0, "shardwright"),
    "Shardwright zero1": Contender(shardwright("zero1"), 1, "shardwright"),
    "Shardwright zero2": Contender(shardwright("zero2"), 2, "shardwright"),
    "Shardwright zero3": Contender(shardwright("zero3"), 3, "shardwright"),
    "Shardwright zero3, arena": Contender(shardwright("zero3", "arena"), 3, "shardwright"),
    "Shardwright zero3, gloo": Contender(shardwright("zero3", gloo=True), 3, "shardwright"),
}
