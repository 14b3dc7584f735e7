"""Edits of sharded tensors by position. They run on a whole tensor that contains this rank's part, which is copied
back.

This is right if each element's new value depends only on that element and the other arguments. So nothing is
communicated, except arguments that are sharded themselves. Other operations raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.tensor import DTensor, Shard

from shardwright.engine.compat.autograd import increment_version
from shardwright.engine.compat.callers import refusal
from shardwright.engine.compat.dtensor import StridedShard, local_of
from shardwright.engine.compat.tensors import tree_map
from shardwright.engine.tensors.naming import parameter_behind
from shardwright.engine.tensors.ragged.tensor import RaggedTensor

_aten = torch.ops.aten
#: In-place operations with positions as arguments. DTensor would use the positions in a rank's part instead.
BY_POSITION = {
    _aten.index_put_, _aten._index_put_impl_, _aten.index_fill_, _aten.index_copy_, _aten.index_add_,
    _aten.index_reduce_, _aten.scatter_, _aten.scatter_add_, _aten.scatter_reduce_, _aten.masked_scatter_, _aten.put_,
    _aten.tril_, _aten.triu_, _aten.fill_diagonal_,
}  # fmt: skip
_BY_ELEMENT = {_aten.fill_, _aten.zero_, _aten.copy_, _aten.masked_fill_, _aten.abs_}


class Step(NamedTuple):
    """One view operation: its function, its arguments after the tensor, and the index of the result."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        result = self.func(tensor, *self.args, **self.kwargs)
        return result if self.number is None else result[self.number]


def views(tensor: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    for step in steps:
        tensor = step.of(tensor)
    return tensor


def can_edit(func: Any) -> bool:
    """Return whether the in-place operation computes each element separately."""
    packet, tags = func.overloadpacket, func.tags
    if torch.Tag.inplace_view in tags:
        return False
    by_itself = torch.Tag.pointwise in tags or torch.Tag.nondeterministic_seeded in tags
    return by_itself or packet in BY_POSITION or packet in _BY_ELEMENT


@torch.no_grad()
def edit(base: Any, steps: Sequence[Step], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the in-place ``func`` with a view of ``base``, a DTensor or a RaggedTensor, as its first argument."""
    local = local_of(base)
    whole, own = with_part(base, func)
    own.copy_(local)
    func(views(whole, steps), *tree_map(whole_of, args[1:]), **tree_map(whole_of, kwargs))
    local.copy_(own)
    if not local.is_inference():
        increment_version([local])


def with_part(base: Any, func: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a new whole tensor of zeros, and this rank's part as a view of it."""
    local = local_of(base)
    whole = local.new_empty_strided(base.shape, base.stride()).zero_()
    if isinstance(base, RaggedTensor):
        spec = base.spec
        if spec.parallel is not None:
            refuse(func, base)
        start, stop = spec.ranges[spec.rank]
        return whole, whole.view(-1)[start:stop].view(local.shape)
    own, mesh = whole, base.device_mesh
    here = mesh.get_coordinate()
    # A strided placement cuts after the mesh dimensions further right.
    axes = sorted(range(mesh.ndim), key=lambda axis: isinstance(base.placements[axis], StridedShard))
    for axis in axes:
        placement = base.placements[axis]
        if isinstance(placement, StridedShard):
            later = [a for a in range(axis + 1, mesh.ndim) if base.placements[a] == Shard(placement.dim)]
            if math.prod(mesh.size(a) for a in later) != placement.split_factor:
                refuse(func, base)
        if isinstance(placement, (Shard, StridedShard)):
            parts = own.chunk(mesh.size(axis), placement.dim)
            own = parts[here[axis]] if here[axis] < len(parts) else own.narrow(placement.dim, 0, 0)
        elif placement.is_partial():
            refuse(func, base)
    if own.shape != local.shape:
        refuse(func, base)
    return whole, own


def whole_of(value: Any) -> Any:
    """Return the whole of a sharded tensor, and any other value unchanged."""
    return value.full_tensor() if isinstance(value, (DTensor, RaggedTensor)) else value


def refuse(func: Any, tensor: Any) -> NoReturn:
    tensor = getattr(tensor, "_viewed", tensor)
    parameter = parameter_behind(tensor) if hasattr(tensor, "_local_tensor") else ""
    label = f"parameter {parameter}, a" if parameter else "a"
    raise refusal(
        f"{func} changes a part of {label} sharded tensor of shape {tuple(tensor.shape)} (an index, slice or strided "
        "view), whose elements are on several ranks; shardwright does not support this. Do it inside `with "
        "shardwright.unsharded(model):`, which shows full parameters, or on .full_tensor() followed by copy_."
    )
