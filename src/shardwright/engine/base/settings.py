"""What users set for a unit or a model: frozen values. ``Unit.change`` is the only writer of a unit's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.comm import Codec, GradientHook
from shardwright.extend.memories import OF_TORCH, NamedMemory
from shardwright.memory import Allocator


@dataclass(frozen=True, slots=True, eq=False)
class Transport:
    """How a unit's weights and gradients travel between ranks.

    Two of them are equal if they are one object: memory is laid out for a transport, and again for the next.

    Attributes:
        codec: how weights are encoded for gathers.
        gather: a collective of the user's.
        scatter: a collective of the user's.
        hook: what carries gradients.
        separate: whether reduce-scatters run in process groups of their own.
    """

    codec: Codec | None = None
    gather: Any = None
    scatter: Any = None
    hook: GradientHook | None = None
    separate: bool = False


AS_TORCH_DOES = Transport()

Prefetched = tuple[weakref.ref[Any], ...]  #: units


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for one unit.

    Attributes:
        reshard_after_forward: None: for all units but the outermost; an integer: to this many ranks.
        reshard_after_backward: False: full parameters stay until they change.
        unshard_in_backward: whether backward gathers.
        sync: whether backward communicates gradients.
        all_reduce: whether it sums them over replicas.
        all_reduce_hook: receives each reduced gradient.
        force_sum: sum in the collectives and divide afterwards.
        divide_by: what gradient sums are divided by; None: the number of ranks.
        forward_prefetch, backward_prefetch: units that are gathered ahead instead of those of the last order.
        fills_unused: whether parameters without a gradient get one of zero.
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
    """What holds for a model; its outermost unit has it. ``strict``: no memory outside the plan."""

    memory: NamedMemory | Allocator = OF_TORCH
    prefetch: int | str = 1
    strict: bool = False
