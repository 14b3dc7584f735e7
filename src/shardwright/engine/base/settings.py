"""The settings of a unit or a model, as frozen values. Only ``Unit.change`` replaces those of a unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.engine.comm import BlockCodec, Codec, GradientHook
from shardwright.engine.extend.named_memories import OF_TORCH, NamedMemory
from shardwright.engine.memory import Allocator


@dataclass(frozen=True, slots=True, eq=False)
class Transport:
    """Settings by which a unit's weights and gradients travel between ranks.

    Two of them are equal only if they are one object, because memory is laid out for one transport.

    Attributes:
        codec: encodes weights for gathers.
        gather: a user's all-gather.
        scatter: a user's reduce-scatter.
        hook: the gradient hook.
        separate: whether reduce-scatters run in separate process groups.
    """

    codec: Codec | BlockCodec | None = None
    gather: Any = None
    scatter: Any = None
    hook: GradientHook | None = None
    separate: bool = False


AS_TORCH_DOES = Transport()

Prefetched = tuple[weakref.ref[Any], ...]  #: units


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one unit.

    Attributes:
        reshard_after_forward: None: True, except for the outermost unit. An integer: keep one k-th for backward.
        reshard_after_backward: False: full parameters stay until they change.
        unshard_in_backward: whether backward gathers.
        sync: whether backward communicates gradients.
        all_reduce: whether it sums them over replicas.
        all_reduce_hook: receives each reduced gradient.
        force_sum: sum in the collectives and divide afterwards.
        divide_by: the divisor of gradient sums; None: the number of ranks.
        forward_prefetch, backward_prefetch: units to gather ahead, in place of the last order.
        fills_unused: whether parameters without a gradient get a gradient of zero.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    sync: bool = True
    all_reduce: bool = True
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    force_sum: bool = False
    divide_by: float | None = None
    fills_unused: bool = False
    transport: Transport = AS_TORCH_DOES
    forward_prefetch: Prefetched = ()
    backward_prefetch: Prefetched = ()


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The settings of a model, stored in its outermost unit. ``strict``: no memory outside the plan."""

    memory: NamedMemory | Allocator = OF_TORCH
    prefetch: int | str = 1
    strict: bool = False
