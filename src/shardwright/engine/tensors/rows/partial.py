"""Sums, norms and extremes that the ranks' parts give, before they are one number, and how they become one.

A result of such an operation is Partial: each rank has its part of it. Here are the operations that keep a result so,
the neutral elements of ranks without elements, and the reductions and gathers that make a tensor whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shardwright.engine.compat.dtensor import dtensor_of, local_of, rebind
from shardwright.engine.tensors.gathering import gathered
from shardwright.engine.tensors.numbers.averaging import SUMS, recipe_of
from shardwright.engine.tensors.numbers.hooks import tracked
from shardwright.engine.tensors.numbers.reading import agree_to_read
from shardwright.engine.tensors.rows.operations import real

_aten = torch.ops.aten
#: They have no result for an empty part. A rank with an empty part uses a neutral element.
EXTREMES = {
    _aten.max.default: -math.inf, _aten.amax.default: -math.inf, _aten.argmax.default: -math.inf,
    _aten.min.default: math.inf, _aten.amin.default: math.inf, _aten.argmin.default: math.inf,
}  # fmt: skip
NORMS = {_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar}
#: They keep a number Partial, to be summed later. Other operations on a Partial number communicate.
LINEAR = {
    _aten.clone, _aten.detach, _aten.alias, _aten._to_copy, _aten.neg, _aten.stack, _aten.cat,
    _aten.view, _aten.unsqueeze, _aten.squeeze, _aten.expand, _aten.zeros_like, _aten.empty_like, _aten.ones_like,
    _aten.full_like,
}  # fmt: skip

#: Autograd makes their gradients from a number, which is equal on every rank.
SUMMED = {_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim}
#: torch would add the ranks' parts of norms and extremes that are not reduced yet, which is wrong.
LINEAR_BY_TORCH = SUMMED | {_aten.nansum.default}
JOINS = {_aten.stack.default, _aten.cat.default}


@torch.no_grad()
def whole_number(tensor: DTensor) -> torch.Tensor:
    """Return the whole tensor, of which a number is read, without graph. Every rank must call this."""
    agree_to_reduce(tensor)
    return gathered(tensor)


def agree_to_reduce(tensor: DTensor) -> None:
    """Meet all ranks, because they are about to communicate for a number of this tensor."""
    mesh = tensor.device_mesh
    if real(tensor):
        axes = [a for a, p in enumerate(tensor.placements) if not p.is_replicate() and mesh.size(a) > 1]
        device = torch.device(mesh.device_type)
        what = f"{tensor.placements} {tensor.dtype} {tensor.shape} {recipe_of(tensor) if tracked([tensor]) else 0}"
        agree_to_read(map(mesh.get_group, axes), device, what)


def _adds_up(placement: Placement) -> bool:
    return type(placement) is Partial and placement.reduce_op in ("sum", "avg")


@torch.no_grad()
def reduced(tensor: Any, sums_stay: bool = False) -> Any:
    """Return the tensor, reduced over the ranks where it is Partial. With ``sums_stay`` sums and means stay Partial."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [
        Replicate() if p.is_partial() and not (sums_stay and _adds_up(p)) else p for p in tensor.placements
    ]
    if placements == list(tensor.placements):
        return tensor
    agree_to_reduce(tensor)
    return DTensor.redistribute(tensor, placements=placements)


def reduce_in_place(tensor: DTensor) -> None:
    """Reduce a tensor that is Partial, because an operation writes into it, or into a view of it."""
    result = reduced(tensor)
    if result is not tensor:
        rebind(tensor, result)


def adds_partial(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether both are sums that are not reduced yet, and may be added so."""
    if func not in SUMS or not all(isinstance(t, DTensor) for t in args[:2]):
        return False
    one, other = args[:2]
    same = one.placements == other.placements and one.dtype == other.dtype and one.shape == other.shape
    return same and all(p.is_replicate() or _adds_up(p) for p in one.placements)


def alike(tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors for a join, all reduced if they are Partial in different ways.

    torch would find no placement for the result.
    """
    kinds = {p for t in tensors if isinstance(t, DTensor) for p in t.placements if p.is_partial()}
    return tensors if len(kinds) < 2 else [reduced(t) for t in tensors]


def with_neutral(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments, with a neutral element in the place of a part without elements."""
    value: float | None = EXTREMES.get(func)
    if value is None:
        order = args[1] if len(args) > 1 else 2
        if not math.isinf(order):
            return args
        value = 0.0 if order > 0 else math.inf
    if isinstance(args[0], (list, tuple)):
        return [_filled(t, value) for t in args[0]], *args[1:]
    return _filled(args[0], value), *args[1:]


def _filled(tensor: Any, value: float) -> Any:
    if not isinstance(tensor, DTensor) or local_of(tensor).numel() or not tensor.numel():
        return tensor
    local = local_of(tensor)
    if local.dtype == torch.bool:
        value = float(value > 0)
    elif not local.is_floating_point():
        limits = torch.iinfo(local.dtype)
        value = limits.max if value > 0 else limits.min
    local = local.new_full([max(size, 1) for size in local.shape], value)
    return dtensor_of(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
