"""The place of a unit's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwright.engine.base.offload import HostReads
from shardwright.engine.comm import Communicator
from shardwright.engine.memory import Owner
from shardwright.engine.tensors.ranks import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class UnitSite:
    """The place of a unit's memory. It never changes.

    Attributes:
        ranks: the ranks over which the unit is sharded.
        owner: the owner of its slabs.
        reads: copies from shards in the CPU's memory; None: shards are on the device.
        neighbours: the ranks that keep the weights together after forward.
        on_gradient: a full parameter calls it with its gradient.
        on_data: a full parameter calls it when user code gets its ``.data``, since writes to it are not seen otherwise.
    """

    ranks: Ranks
    owner: Owner
    reads: HostReads | None
    neighbours: Communicator | None
    on_gradient: Callable[[torch.Tensor], None]
    on_data: Callable[[torch.Tensor], None]
