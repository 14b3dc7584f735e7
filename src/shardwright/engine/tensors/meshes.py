"""Meshes: one whose ranks ascend along every axis, for one whose ranks do not, and the group of all ranks of a mesh.

torch sorts the ranks of a process group. On a mesh such as ``[1, 0]`` a rank's coordinate is therefore not its number
in the group of that axis, and torch itself numbers the parts of a tensor in both ways. The engine shards over a mesh
on which the two numbers agree, so no other file has to know which of them an operation uses.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.engine.comm.groups import make_group
from shardwright.engine.compat.dtensor import root_mesh_of


def ascends(mesh: DeviceMesh, axes: Iterable[int] | None = None) -> bool:
    """Return whether the ranks of a mesh ascend along each of these axes (default: all), for all ranks alike."""
    return _ascends(mesh.mesh, range(mesh.ndim) if axes is None else axes)


def _ascends(grid: torch.Tensor, axes: Iterable[int]) -> bool:
    return all(bool((grid.diff(dim=axis) > 0).all()) for axis in axes)


def check_ascends(*parts: DeviceMesh) -> None:
    """Raise ValueError on all ranks if the ranks of the mesh of which these are parts do not ascend along them."""
    whole = root_mesh_of(parts[0])
    names = whole.mesh_dim_names or ()
    asked = {name for part in parts for name in part.mesh_dim_names or ()}
    for axis, name in enumerate(names):
        if name in asked and not ascends(whole, [axis]):
            raise ValueError(
                f"the ranks of {whole.mesh.tolist()} do not ascend along {name!r}, and there torch numbers the parts "
                "of a DTensor in two ways"
            )


#: Meshes that were made below, by the name of the group of the given mesh's first axis and by what else defines them.
#: With each is a reference to that group, because another group may get the same name later.
_made: dict[object, tuple[weakref.ref[dist.ProcessGroup], DeviceMesh]] = {}


def ascending(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh if its ranks ascend along every axis, else a mesh of the same shape and ranks that does.

    If possible, the new mesh has the process groups of the given one: each row is sorted, then the rows. On a mesh such
    as ``[[0, 3], [1, 2]]`` no order of rows and columns ascends, so all ranks are sorted and get new groups. All ranks
    of the mesh must call this together.
    """
    if ascends(mesh):
        return mesh
    group = mesh.get_group(0)
    names, ranks = mesh.mesh_dim_names, tuple(mesh.mesh.flatten().tolist())
    key = group.group_name, mesh.device_type, names, tuple(mesh.shape), ranks
    known = _made.get(key)
    if known is None or known[0]() is not group:
        known = _made[key] = weakref.ref(group), _ascending(mesh)
    return known[1]


def _ascending(mesh: DeviceMesh) -> DeviceMesh:
    rows = mesh.mesh.sort(dim=-1).values
    grid = rows if mesh.ndim == 1 else rows[rows[:, 0].argsort()]
    if not _ascends(grid, range(grid.ndim)):
        grid = mesh.mesh.flatten().sort().values.view(mesh.mesh.shape)
    here = (grid == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for axis in range(grid.ndim):
        line = grid[tuple(slice(None) if a == axis else place for a, place in enumerate(here))].tolist()
        groups.append(_group(mesh.get_group(axis), line))
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
    names = mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(mesh.ndim))
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=grid, mesh_dim_names=names)


def _group(present: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """Return the present group if it has these ranks in this order, else a new one."""
    if dist.get_process_group_ranks(present) == ranks:
        return present
    return make_group(ranks)


#: Groups of whole meshes by the group of the first dimension, which several meshes may share, and by their ranks.
_whole_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a group of all ranks of a mesh of several dimensions. All ranks must call this together."""
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    groups = _whole_groups.setdefault(mesh.get_group(0), {})
    if ranks not in groups:
        groups[ranks] = make_group(ranks)
    return groups[ranks]
