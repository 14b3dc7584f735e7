"""The place of optimizer state with one element per block: each element is on the rank of its block."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor

from shardwright.engine import RaggedSpec, RaggedTensor, cut_dim


def block_spec(p: DTensor | RaggedTensor, block: int) -> RaggedSpec:
    """The spec of a 1-D tensor with one element for each ``block`` consecutive elements of ``p``. The last may be
    short.

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
    mesh = p.device_mesh
    dims = [(a, cut_dim(each)) for a, each in enumerate(p.placements)]
    cuts = [(a, dim) for a, dim in dims if dim is not None and mesh.shape[a] > 1]
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
