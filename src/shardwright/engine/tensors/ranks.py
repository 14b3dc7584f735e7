"""A strategy on a mesh: the ranks that cut a parameter, and the ranks of each collective of a step.

The numbers of a parameter's shards let every gather fill a contiguous piece. Axes that shard parameters are the most
significant, then axes that shard gradients, then axes that shard only the optimizer state. Gathers run from the last of
these axes to the first, reductions from the first to the last. Then one sum runs over axes that replicate everything.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwright.engine.comm import Communicator
from shardwright.engine.layout import Strategy
from shardwright.engine.tensors.meshes import ascending, group_of
from shardwright.engine.tensors.tensor_parallel import Spmd

#: An axis of fewer ranks communicates nothing. Tests set 1: on a machine with one GPU, NCCL then runs in its streams.
LEAST_RANKS = 2

MakeCommunicator = Callable[[dist.ProcessGroup | None], Communicator]


class Ranks:
    """The ranks of a unit.

    Attributes:
        mesh: the data-parallel mesh. Its ranks ascend, in whatever order :func:`fully_shard` got them.
        spmd: the whole mesh of all parameters, if ``dp_mesh_dims`` was passed.
        parts, part: the number of shards of a parameter, and the number of this rank's shard.
        size: number of data-parallel ranks, by which gradients are divided.
        once: communicators of the gathers that fill a copy kept until the weights change, in their order.
        gathers: communicators of the gathers of every use.
        scatters: communicators that reduce-scatter the gradients of every backward, in their order.
        late: communicators that reduce-scatter in the last backward of a step.
        replicas: the communicator that all-reduces in the last backward, if there is one.
        every: one for each axis with several ranks, the innermost first.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        strategy: Strategy,
        communicator: MakeCommunicator,
        spmd: Spmd | None = None,
    ) -> None:
        self.mesh = mesh = ascending(mesh)
        self.spmd = spmd
        self.strategy = strategy
        self.size = mesh.size()
        stages = strategy.stages
        shape, here = mesh.shape, mesh.get_coordinate()
        assert here is not None
        axes = [axis for axis in range(mesh.ndim) if shape[axis] >= LEAST_RANKS]
        comms = {axis: communicator(mesh.get_group(axis)) for axis in axes}
        self.local = communicator(None)
        self.every = [comms[axis] for axis in reversed(axes)]
        sharded = sorted(
            (axis for axis in axes if stages[axis]), key=lambda axis: (-stages[axis], -axis)
        )  # the first counts most
        #: Mesh axes that cut parameters, the most significant first.
        self.axes = tuple(sharded)
        self.parts = math.prod(shape[axis] for axis in sharded)
        self.part = 0
        for axis in sharded:
            self.part = self.part * shape[axis] + here[axis]
        self.once = [comms[axis] for axis in reversed(sharded) if stages[axis] < 3]
        self.gathers = [comms[axis] for axis in reversed(sharded) if stages[axis] == 3]
        self.scatters = [comms[axis] for axis in sharded if stages[axis] > 1]
        self.late = [comms[axis] for axis in sharded if stages[axis] == 1]
        self.replicas = [comms[axis] for axis in axes if not stages[axis]]
        if len(self.replicas) > 1:  # one sum over all ranks sends less than one for each axis
            self.replicas = [communicator(group_of(mesh))]
        #: Whether full parameters stay gathered until the weights change.
        self.keeps_full = not self.gathers and bool(self.once)
        #: Whether the strategy keeps them so, for any sizes of the mesh.
        self.replicates_parameters = 3 not in stages and any(stages)
        #: Whether whole gradients wait for the last backward of a step.
        self.waits = not self.scatters and bool(self.late or self.replicas)
        #: Whether sums over the ranks that shard gradients wait for the last backward of a step.
        self.finishes_late = bool(self.scatters) and bool(self.late or self.replicas)

    @property
    def comm(self) -> Communicator:
        """The communicator of the gather that fills the slab."""
        return (self.gathers or self.once or [self.local])[-1]

    def with_scatters(self, communicator: Callable[[Communicator], Communicator]) -> Ranks:
        """Return a copy whose reduce-scatters use ``communicator`` of each of the present communicators."""
        other = copy.copy(self)
        other.scatters = [communicator(comm) for comm in self.scatters]
        other.late = [communicator(comm) for comm in self.late]
        return other

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """Return the placements of a parameter that is cut along ``dim`` (None: not cut), on the mesh."""
        cut = [a for a in range(self.mesh.ndim) if self.strategy.stages[a]]
        return tuple(
            Shard(dim) if dim is not None and axis in cut else Replicate() for axis in range(self.mesh.ndim)
        )

    def is_of(self, mesh: DeviceMesh | None) -> bool:
        """Return whether these are the ranks of this mesh, even if it has them in another order than :attr:`mesh`."""
        return mesh is not None and (mesh == self.mesh or ascending(mesh) == self.mesh)

    def same(self, other: Ranks) -> bool:
        """Return whether both are the ranks of one mesh."""
        return self.mesh == other.mesh

    def shard_mesh(self, name: str) -> DeviceMesh:
        """Return the 1-D mesh along which parameters are cut, for the extended parameter ``name``."""
        axes = [axis for axis, stage in enumerate(self.strategy.stages) if stage]
        if len(axes) != 1:
            raise NotImplementedError(
                f"parameter {name!r} has fsdp_pre_all_gather, so it must be sharded over one mesh axis; "
                f"{self.strategy} shards over {len(axes)}"
            )
        if self.mesh.ndim == 1:
            return self.mesh
        return DeviceMesh.from_group(self.mesh.get_group(axes[0]), self.mesh.device_type)

    @property
    def device(self) -> torch.device:
        return self.local.device
