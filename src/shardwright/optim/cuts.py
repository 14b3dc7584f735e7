"""Where a layout cuts a parameter, and the place of state with one element per block of a parameter.

Nothing here communicates or knows an optimizer.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor

from shardwright.engine import RaggedSpec, RaggedTensor, cut_dim


def cut_axes(p: DTensor) -> list[tuple[int, int]]:
    """Return the mesh axes of several ranks that cut a DTensor, each with the dimension that it cuts."""
    dims = zip(map(cut_dim, p.placements), p.device_mesh.shape, strict=True)
    return [(axis, dim) for axis, (dim, ranks) in enumerate(dims) if dim is not None and ranks > 1]


def is_cut_twice(p: torch.Tensor) -> bool:
    """Return whether a parameter is cut over mesh axes that are not data-parallel, or over several axes."""
    if isinstance(p, RaggedTensor):
        return p.spec.parallel is not None and bool(p.spec.parallel.groups)
    return isinstance(p, DTensor) and len(cut_axes(p)) > 1


def cut_inside(p: torch.Tensor, block: int) -> int | None:
    """Return the first element of a part that begins inside a block, for a parameter that is not cut twice.

    Blocks have ``block`` consecutive elements. None if no block is cut.
    """
    starts: list[int] = []
    if isinstance(p, RaggedTensor):
        starts = [start for start, stop in p.spec.ranges if 0 < start < stop]
    elif isinstance(p, DTensor):
        for axis, dim in cut_axes(p):
            slices = math.prod(p.shape[dim + 1 :])
            rows = -(-p.shape[dim] // p.device_mesh.shape[axis])  # as torch.chunk cuts
            if rows < p.shape[dim]:  # else all are on the first rank
                # Of a later dimension the next part of the first rank begins after one whole run of the dimension.
                starts = [rows * slices, p.shape[dim] * slices if dim else 0]
    return next((start for start in starts if start % block), None)


def block_spec(p: DTensor | RaggedTensor, block: int) -> RaggedSpec:
    """Return the spec of a 1-D tensor with one element for each ``block`` consecutive elements of ``p``.

    Each element is on the rank of its block. The last block may be short.

    Raises:
        ValueError: the parameter is cut along another dimension than the first, or over two mesh axes of a DTensor, or
            by tensor parallelism.
    """
    spec = p.spec if isinstance(p, RaggedTensor) else _spec_of_rows(p)
    if spec.parallel is not None and spec.parallel.groups:
        raise ValueError(
            f"Tensor parallelism cuts a tensor of shape {tuple(p.shape)} as {spec.parallel.placements}, so the "
            "blocks of its parts are not blocks of the whole tensor. Use an optimizer that updates single elements."
        )
    owned = [-(-stop // block) - start // block for start, stop in spec.ranges]
    first = next(rank for rank, blocks in enumerate(owned) if blocks)
    # Each rank between the first and the last owner has a full chunk of them.
    chunk = max(owned)
    offset = (first + 1) * chunk - owned[first]
    return RaggedSpec(torch.Size([-(-spec.numel // block)]), offset, chunk, spec.mesh, axes=spec.axes)


def _spec_of_rows(p: DTensor) -> RaggedSpec:
    """Return the spec with which a RaggedTensor would have the parts of a DTensor that is cut into rows."""
    mesh, cuts = p.device_mesh, cut_axes(p)
    if len(cuts) > 1 or any(dim for _, dim in cuts):
        raise ValueError(
            f"A tensor of shape {tuple(p.shape)} is placed {p.placements} on a mesh of {tuple(mesh.shape)}, so the "
            "blocks on a rank are not consecutive. Shard it over one axis along its first dimension, without a "
            "shard_placement_fn, or with a ragged layout."
        )
    if not cuts:
        return RaggedSpec(p.shape, 0, max(p.numel(), 1), mesh, axes=())
    axis = cuts[0][0]
    chunk = -(-p.shape[0] // mesh.shape[axis]) * math.prod(p.shape[1:])  # as torch.chunk cuts
    return RaggedSpec(p.shape, 0, chunk, mesh, axes=(axis,))
