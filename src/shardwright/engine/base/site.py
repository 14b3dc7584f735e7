"""Where a unit's memory is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwright.comm import Communicator
from shardwright.engine.base.offload import HostReads
from shardwright.engine.tensors.ranks import Ranks
from shardwright.memory import Owner


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """For as long as the unit lives.

    Attributes:
        ranks: over which it is sharded.
        owner: of its slabs.
        reads: of shards in the CPU's memory; None: they are on the device.
        neighbours: among whom the weights are kept after forward.
        on_gradient: what a full parameter calls with its gradient.
        on_data: what a full parameter calls when its ``.data`` is handed out: nothing else shows what is written there.
    """

    ranks: Ranks
    owner: Owner
    reads: HostReads | None
    neighbours: Communicator | None
    on_gradient: Callable[[torch.Tensor], None]
    on_data: Callable[[torch.Tensor], None]
