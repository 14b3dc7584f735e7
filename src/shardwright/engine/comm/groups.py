"""Process groups and meshes of this package: they wait as long as the job's own group, and only their ranks make them.

torch gives each new group its own default timeout, whatever the job's group has. And where the job's group is bound to
a device, NCCL splits each new communicator off the job's, in which every rank of the job has to take part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.engine.compat.collectives import set_group_timeout, timeout_of_world, without_bound_device


def make_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Make a group of these ranks of the job, in ascending order. These ranks call it together, and no others need to.

    Args:
        ranks: ranks of the job.
        backend: of the group, such as "nccl". Default: that of the job's group.
    """
    timeout = timeout_of_world()
    if len(ranks) == dist.get_world_size():
        return dist.new_group(list(ranks), backend=backend, timeout=timeout)
    with without_bound_device():
        # torch derives the name of such a group from its ranks and from the groups that each of them knows.
        return dist.new_group(list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True)


def make_mesh(device_type: str, sizes: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
    """Make a mesh of all ranks of the job, as torch's ``init_device_mesh`` does. All ranks call it together."""
    mesh = init_device_mesh(device_type, tuple(sizes), mesh_dim_names=None if names is None else tuple(names))
    timeout = timeout_of_world()
    for group in mesh.get_all_groups():
        if group is not dist.group.WORLD:
            set_group_timeout(group, timeout)
    return mesh
