"""A strategy on a mesh: which ranks cut a parameter, and over which of them each collective of a step runs.

The shards of a parameter are numbered so that every gather fills a contiguous piece: axes whose parameters are sharded
count most, then those that shard gradients, then those that shard the optimizer state alone. Gathers run from the last
of these to the first, reductions from the first to the last; then the axes that replicate everything are summed over.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwright.comm import Communicator
from shardwright.engine.tensors.tensor_parallel import Spmd
from shardwright.layout import Strategy

MakeCommunicator = Callable[[int | None], Communicator]


class Ranks:
    """What a unit knows of its ranks.

    Attributes:
        mesh: the data-parallel one.
        spmd: the whole mesh on which every parameter lies already, where that was said.
        parts, part: into how many shards its parameters are cut, and which of them is this rank's.
        size: number of data-parallel ranks, by which gradients are divided.
        once: communicators of the gathers that fill a copy kept until the weights change, in their order.
        gathers: those of every use.
        scatters: those that reduce-scatter the gradients of every backward, in their order.
        late: those that reduce-scatter in the last backward of a step.
        replicas: those that all-reduce in the last backward.
        every: one for each axis of more than one rank, the innermost first.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        strategy: Strategy,
        communicator: MakeCommunicator,
        spmd: Spmd | None = None,
    ) -> None:
        self.mesh = mesh
        self.spmd = spmd
        self.strategy = strategy
        self.size = mesh.size()
        stages = strategy.stages
        shape, here = mesh.shape, mesh.get_coordinate()
        assert here is not None
        axes = [axis for axis in range(mesh.ndim) if shape[axis] > 1]
        comms = {axis: communicator(axis) for axis in axes}
        self.local = communicator(None)
        self.every = [comms[axis] for axis in reversed(axes)]
        sharded = sorted(
            (axis for axis in axes if stages[axis]), key=lambda axis: (-stages[axis], -axis)
        )  # the first counts most
        #: Mesh axes that cut parameters, the one that counts most first.
        self.axes = tuple(sharded)
        self.parts = math.prod(shape[axis] for axis in sharded)
        self.part = 0
        for axis in sharded:
            self.part = self.part * shape[axis] + here[axis]
        self.once = [comms[axis] for axis in reversed(sharded) if stages[axis] < 3]
        self.gathers = [comms[axis] for axis in reversed(sharded) if stages[axis] == 3]
        self.scatters = [comms[axis] for axis in sharded if stages[axis] > 1]
        self.late = [comms[axis] for axis in sharded if stages[axis] == 1]
        self.replicas = [comms[axis] for axis in reversed(axes) if not stages[axis]]
        #: Whether full parameters stay gathered until the weights change, since no use of them is gathered anew.
        self.keeps_full = not self.gathers and bool(self.once)
        #: Whether the strategy says so, whatever the sizes of the mesh.
        self.replicates_parameters = 3 not in stages and any(stages)
        #: Whether whole gradients wait for the last backward of a step.
        self.waits = not self.scatters and bool(self.late or self.replicas)
        #: Whether sums over the ranks that shard gradients wait for the last backward of a step.
        self.finishes_late = bool(self.scatters) and bool(self.late or self.replicas)

    @property
    def comm(self) -> Communicator:
        """That of the gather which fills the slab."""
        return (self.gathers or self.once or [self.local])[-1]

    def with_scatters(self, communicator: Callable[[Communicator], Communicator]) -> Ranks:
        """The same, but reduce-scatters run over what ``communicator`` gives for each of theirs."""
        other = copy.copy(self)
        other.scatters = [communicator(comm) for comm in self.scatters]
        other.late = [communicator(comm) for comm in self.late]
        return other

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """Of a parameter cut along ``dim`` (None: not at all), on the mesh."""
        cut = [a for a in range(self.mesh.ndim) if self.strategy.stages[a]]
        return tuple(
            Shard(dim) if dim is not None and axis in cut else Replicate() for axis in range(self.mesh.ndim)
        )

    def same(self, other: Ranks) -> bool:
        """Whether they are those of one mesh."""
        return self.mesh == other.mesh

    def shard_mesh(self, name: str) -> DeviceMesh:
        """The 1-D mesh along which parameters are cut, for the parameter ``name`` that gathers itself."""
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
