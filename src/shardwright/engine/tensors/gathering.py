"""Gathers a whole sharded tensor with plain all-gathers along its mesh.

torch's ``DTensor.full_tensor`` gathers with an operation whose name has more than 15 characters. On gloo such names
race with one another and corrupt the heap (see ``engine/comm/collectives.py``), so the engine gathers its tensors
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright.engine.compat.collectives import all_gather_single
from shardwright.engine.compat.dtensor import dtensor_of, local_of
from shardwright.engine.compat.storages import storage_key
from shardwright.engine.memory import resize


def gathers_plainly(tensor: DTensor) -> bool:
    """Return whether :func:`whole` can gather this tensor: it is on its groups' device and has no partial sums."""
    local = local_of(tensor)
    return (
        type(local) is torch.Tensor
        and not local.is_meta
        and local.device.type == tensor.device_mesh.device_type
        and all(type(p) in (Shard, Replicate) for p in tensor.placements)
    )


def whole(tensor: DTensor) -> torch.Tensor:
    """Return the whole tensor, with graph, if it :func:`gathers_plainly`. Every rank of its mesh must call this."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _GatherWhole.apply(tensor)  # type: ignore[no-any-return]
    return _gather(tensor)


def full_of(tensor: Any) -> torch.Tensor:
    """Return ``tensor.full_tensor()`` of any sharded tensor, with plain all-gathers if possible."""
    if isinstance(tensor, DTensor) and gathers_plainly(tensor):
        return whole(tensor)
    return tensor.full_tensor()  # type: ignore[no-any-return]


@torch.no_grad()
def gathered(tensor: DTensor) -> torch.Tensor:
    """Return the whole tensor, without graph, on the device of its mesh. Every rank of the mesh must call this.

    The local tensor may be offloaded to the host, but communication needs the device.
    """
    mesh = tensor.device_mesh
    local = local_of(tensor).detach().to(torch.device(mesh.device_type))
    return full_of(dtensor_of(local, mesh, tensor.placements, tensor.shape, tensor.stride()))


def replicated(tensor: DTensor) -> DTensor:
    """Return the whole tensor as a replicated DTensor, without graph."""
    mesh, full = tensor.device_mesh, _gather(tensor)
    return dtensor_of(full, mesh, (Replicate(),) * mesh.ndim, tensor.shape, full.stride())


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        return _gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:  # type: ignore[override]
        mesh: DeviceMesh = ctx.mesh
        everywhere = (Replicate(),) * mesh.ndim
        # Each rank takes its part, without communication.
        return DTensor.from_local(gradient, mesh, everywhere, run_check=False).redistribute(
            placements=ctx.placements
        )


@torch.no_grad()
def _gather(tensor: DTensor) -> torch.Tensor:
    mesh, local = tensor.device_mesh, local_of(tensor).detach()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return local
    sizes = _sizes_before(tensor, coordinate)
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if isinstance(placement, Shard):
            local = _gather_axis(local, placement.dim, sizes[axis], mesh, axis)
    return local


def _sizes_before(tensor: DTensor, coordinate: Sequence[int]) -> list[int]:
    """Return for each mesh axis the size of its sharded dimension on this rank before the axis cuts it.

    The axes on its left have cut the dimension then.
    """
    shape, sizes = list(tensor.shape), []
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard):
            sizes.append(0)
            continue
        size = shape[placement.dim]
        sizes.append(size)
        chunk = -(-size // tensor.device_mesh.size(axis))
        first = min(coordinate[axis] * chunk, size)
        shape[placement.dim] = min(first + chunk, size) - first
    return sizes


def _gather_axis(local: torch.Tensor, dim: int, size: int, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """Join the ranks' parts, which torch.chunk made along ``dim``."""
    ranks = mesh.size(axis)
    if ranks == 1:
        return local
    rows = local.movedim(dim, 0)
    chunk = -(-size // ranks)
    mine = rows.contiguous() if rows.shape[0] == chunk else rows.new_zeros(chunk, *rows.shape[1:])
    if rows.shape[0] != chunk:
        mine[: rows.shape[0]].copy_(rows)
    gathered = mine.new_empty(ranks * chunk, *rows.shape[1:])
    # As bytes: backends do not know every dtype.
    all_gather_single(_bytes_of(gathered), _bytes_of(mine), group=mesh.get_group(axis))
    whole = gathered[:size].movedim(0, dim).contiguous()
    kept = storage_key(whole), storage_key(local)
    free(*(buffer for buffer in (gathered, mine) if storage_key(buffer) not in kept))
    return whole


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor. Dimensions of one element may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def free(*buffers: torch.Tensor) -> None:
    """Free the memory of buffers that a collective has used.

    Gloo's thread holds the tensors of a collective for a moment after ``wait`` has returned. Without this, memory that
    is dead would add to the next tensor's.
    """
    for buffer in buffers:
        if type(buffer) is torch.Tensor and not buffer.is_meta:
            resize(buffer.untyped_storage(), 0)
