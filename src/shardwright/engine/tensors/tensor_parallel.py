"""Parameters that are already on other mesh axes when they are sharded, by tensor or expert parallelism.

Only the local part of such a parameter is cut over the data-parallel ranks. A :class:`TensorParallel` defines the form
that the module sees while its unit is gathered, and the form between steps. This file knows no units, slabs and
layouts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwright.engine.compat.dtensor import StridedShard, concatenated, flattened, local_of, waited
from shardwright.engine.compat.fully_shard import DataParallelMeshDims
from shardwright.engine.tensors.gathering import full_of, gathers_plainly
from shardwright.engine.tensors.meshes import check_ascends

Bounds = tuple[tuple[int, ...], tuple[int, ...]]


def cut_dim(placement: Placement) -> int | None:
    """Return the dimension that a placement cuts, also if it is strided, unlike ``is_shard``. None if it cuts none."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


@dataclass(frozen=True)
class TensorParallel:
    """The placement of a parameter of ``shape`` and ``stride`` on the axes that are not data-parallel.

    Attributes:
        mesh, placements: of the DTensor that the module sees while the parameter is full.
        data: data-parallel axes of ``mesh``, on which it is replicated; mostly none.
        rest: the mesh of its form between steps.
        places: for each axis of ``rest``, the axis of the data-parallel mesh that it is, or -1 - the axis of ``mesh``.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    rest: DeviceMesh
    places: tuple[int, ...]
    data: tuple[int, ...] = ()

    @functools.cached_property
    def box(self) -> Bounds:
        """Offsets and sizes of this rank's part before data parallelism cuts it, which is one rectangle."""
        here = self.mesh.get_coordinate()
        assert here is not None
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        for axis, placement in enumerate(self.placements):
            dim = cut_dim(placement)
            if dim is not None:
                rows = -(-sizes[dim] // self.mesh.shape[axis])  # as torch.chunk cuts
                first = min(here[axis] * rows, sizes[dim])
                offsets[dim] += first
                sizes[dim] = min(rows, sizes[dim] - first)
        return tuple(offsets), tuple(sizes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.box[1]

    @functools.cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which parts are gathered."""
        return tuple(
            self.mesh.get_group(axis)
            for axis, placement in enumerate(self.placements)
            if cut_dim(placement) is not None and self.mesh.shape[axis] > 1
        )

    @functools.cached_property
    def axes(self) -> tuple[dist.ProcessGroup, ...]:
        """The group of each axis with several ranks that is not data-parallel, whether it cuts or replicates."""
        axes = (a for a in range(self.mesh.ndim) if a not in self.data and self.mesh.shape[a] > 1)
        return tuple(map(self.mesh.get_group, axes))

    @functools.cached_property
    def is_first_copy(self) -> bool:
        """Whether this rank is the first of the ranks with the same part."""
        here = self.mesh.get_coordinate()
        assert here is not None
        copies = (a for a, p in enumerate(self.placements) if cut_dim(p) is None and a not in self.data)
        return not any(here[axis] for axis in copies)

    def at_rest(self, data: Sequence[Placement]) -> tuple[Placement, ...]:
        """Return the placements on ``rest`` for a tensor with placements ``data`` on the data-parallel mesh.

        If an axis further right has cut the same dimension before, the placement is strided, as in FSDP2.
        """
        placements = [data[p] if p >= 0 else self.placements[-1 - p] for p in self.places]
        for axis, place in enumerate(self.places):
            dim = cut_dim(placements[axis]) if place >= 0 else None
            if dim is not None:
                right = zip(
                    placements[axis + 1 :], self.places[axis + 1 :], self.rest.shape[axis + 1 :], strict=True
                )
                factor = math.prod(size for other, p, size in right if p < 0 and cut_dim(other) == dim)
                if factor > 1:
                    placements[axis] = StridedShard(dim, split_factor=factor)
        return tuple(placements)

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Return the form that the module sees, over this rank's part, without communication."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def part_of(self, source: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor, whole or a DTensor. A view if it is a DTensor with equal placements."""
        if isinstance(source, DTensor):
            if source.device_mesh == self.mesh and (
                source.placements == self.placements or not gathers_plainly(source)
            ):
                return waited(local_of(source.redistribute(placements=self.placements)))
            source = full_of(source)
        for dim, (first, size) in enumerate(zip(*self.box, strict=True)):
            source = source.narrow(dim, first, size)
        return source

    def gradient(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's part of a gradient.

        A partial sum is summed in ``dtype``. Otherwise the gradient keeps its dtype.
        """
        if not isinstance(gradient, DTensor):
            raise RuntimeError(
                f"A tensor-parallel parameter of shape {tuple(self.shape)} got a gradient that is a plain tensor of "
                f"shape {tuple(gradient.shape)}, expected a DTensor on {self.mesh}."
            )
        if gradient.placements == self.placements:
            return waited(local_of(gradient))
        if any(cut_dim(gradient.placements[axis]) is not None for axis in self.data):
            raise RuntimeError(
                f"A parameter of shape {tuple(self.shape)} got a gradient placed {gradient.placements} on "
                f"{self.mesh}. On the data-parallel dimensions {self.data} the gradient must be Partial or Replicate."
            )
        placements = tuple(
            own if axis in self.data else placement
            for axis, (own, placement) in enumerate(zip(gradient.placements, self.placements, strict=True))
        )
        if placements != gradient.placements:
            own_dtype = gradient.dtype
            # A sum is rounded once, like the gradient of the whole batch, and not at each addition.
            wide: DTensor = gradient.to(torch.promote_types(own_dtype, dtype))  # type: ignore[assignment]
            return waited(local_of(wide.redistribute(placements=placements))).to(own_dtype)
        return waited(local_of(gradient))


#: The meshes of parameters between steps, each with the data-parallel mesh and the other mesh that form it.
_meshes: dict[DeviceMesh, tuple[DeviceMesh, DeviceMesh]] = {}


def both_meshes(data: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the axes of ``data`` and then of ``other``.

    Raises:
        ValueError: they are not parts of one named mesh whose ranks ascend, or overlap.
    """
    for both, pair in _meshes.items():
        if pair == (data, other) and _is_of(both, data, other):
            return both
    if data.mesh_dim_names is None or other.mesh_dim_names is None:
        raise ValueError(f"the meshes {data} and {other} must have mesh_dim_names and be parts of one mesh")
    check_ascends(other, data)
    try:
        both = concatenated(data, other)
    except RuntimeError as error:
        raise ValueError(f"{data} and {other} are not separate parts of one mesh ({error})") from None
    _meshes.pop(both, None)  # an equal mesh whose process groups no longer exist
    _meshes[both] = data, other
    return both


def _is_of(both: DeviceMesh, *parts: DeviceMesh) -> bool:
    """Return whether it has the process groups of these meshes. After a new init_process_group equal meshes may not."""
    try:
        groups = [both.get_group(axis) for axis in range(both.ndim)]
    except (KeyError, RuntimeError, ValueError):
        return False
    own = [mesh.get_group(axis) for mesh in parts for axis in range(mesh.ndim)]
    return all(one is other for one, other in zip(groups, own, strict=True))


@dataclass(frozen=True)
class Spmd:
    """A mesh on which every parameter is already a DTensor, before its data-parallel axes cut the parameter.

    Attributes:
        mesh, data: the mesh, and its data-parallel axes.
        rest, places: as in :class:`TensorParallel`.
    """

    mesh: DeviceMesh
    data: tuple[int, ...]
    rest: DeviceMesh
    places: tuple[int, ...]


def data_parallel(mesh: DeviceMesh, dims: DataParallelMeshDims) -> tuple[DeviceMesh, Spmd]:
    """Return the data-parallel mesh that ``dims`` names, replicas outside and shards inside, and its :class:`Spmd`.

    Several names become one axis.

    Raises:
        ValueError: no name is given, or one is not of the mesh. Or its ranks do not ascend along every dimension.
    """
    shard, replicate = (
        (field,) if isinstance(field, str) else tuple(field or ()) for field in (dims.shard, dims.replicate)
    )
    names_of_mesh = mesh.mesh_dim_names
    if (
        names_of_mesh is None
        or not (shard or replicate)
        or len({*shard, *replicate} & {*names_of_mesh}) < len(shard + replicate)
    ):
        raise ValueError(
            f"dp_mesh_dims names mesh dimensions {replicate} that replicate and {shard} that shard; expected one or "
            f"more of the mesh's names, {names_of_mesh}, each once."
        )
    check_ascends(mesh)
    parts = [
        mesh[names[0]] if len(names) == 1 else flattened(mesh[names]) for names in (replicate, shard) if names
    ]
    data = parts[0] if len(parts) == 1 else concatenated(*parts)
    inside = data.ndim - 1 if shard else -1
    places = [
        inside if name in shard else 0 if name in replicate else -1 - axis
        for axis, name in enumerate(names_of_mesh)
    ]
    axes = tuple(axis for axis, place in enumerate(places) if place >= 0)
    if len(shard) < 2:
        return data, Spmd(mesh, axes, mesh, tuple(places))
    # Between steps several axes that shard become one axis at the place of the first, as in FSDP2.
    rest: list[DeviceMesh] = []
    places = []
    for axis, name in enumerate(names_of_mesh):
        if name == next(n for n in names_of_mesh if n in shard):
            rest.append(data)
            places += range(data.ndim)
        elif name not in shard and name not in replicate:
            rest.append(mesh[name])
            places.append(-1 - axis)
    return data, Spmd(mesh, axes, concatenated(*rest) if len(rest) > 1 else data, tuple(places))


def parallel_of(name: str, p: DTensor, data: DeviceMesh, spmd: Spmd | None) -> TensorParallel | None:
    """Return the placement of a parameter, sharded or not, on axes that are not data-parallel. None if it has none.

    Raises:
        NotImplementedError: its placement cannot be sharded over that mesh.
        ValueError: it is not on the mesh of ``spmd``.
    """
    mesh, placements = p.device_mesh, p.placements
    where = f"parameter {name!r} of shape {tuple(p.shape)}, a DTensor placed {placements} on {mesh},"
    if spmd is not None:
        if mesh not in (spmd.mesh, spmd.rest):
            raise ValueError(f"{where} is expected on the mesh passed with dp_mesh_dims, {spmd.mesh}.")
        at = spmd.places if mesh == spmd.rest else range(-1, -1 - mesh.ndim, -1)
        placements = tuple(
            Replicate() if axis in spmd.data else placements[at.index(-1 - axis)]
            for axis in range(spmd.mesh.ndim)
        )
        mesh, rest, places, axes = spmd.mesh, spmd.rest, spmd.places, spmd.data
    elif mesh == data:
        return None
    elif mesh in _meshes and _meshes[mesh][0] == data:  # its form of between steps was loaded or assigned
        rest, mesh, placements = mesh, _meshes[mesh][1], placements[data.ndim :]
    else:
        try:
            rest = both_meshes(data, mesh)
        except ValueError as error:
            raise NotImplementedError(
                f"{where} cannot be sharded over {data}: {error}. Make both meshes named parts of one mesh, such as "
                'init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp")). Or shard the parameter first, or '
                "pass it in ignored_params."
            ) from None
    if spmd is None:
        places, axes = (*range(data.ndim), *(-1 - axis for axis in range(mesh.ndim))), ()
    if not all(isinstance(placement, (Shard, Replicate)) for placement in placements):
        raise NotImplementedError(
            f"{where} cannot be sharded over {data}: expected Shard or Replicate on every mesh dimension. Redistribute "
            "it first, or pass it in ignored_params."
        )
    return TensorParallel(p.shape, p.stride(), mesh, tuple(placements), rest, places, axes)
