"""``reshard_after_forward=k``: after forward a rank keeps one k-th of a unit's full weights for the gather of backward.

That gather then runs among k neighbouring ranks, say those of one host, instead of all. ZeRO++ calls what is kept the
secondary partition (https://arxiv.org/abs/2306.10209, section 3.2).
"""

from __future__ import annotations

import torch

from shardwright._torch import foreach_copy_
from shardwright.comm import Communicator
from shardwright.engine.ledger import NEVER
from shardwright.memory import Owner, Slab


class SecondaryShard:
    """This rank's part of a unit's gathered weights among its neighbours, in the compute dtype.

    Attributes:
        comm: over the neighbours.
        inputs: this rank's part, as byte tensors; what is gathered of them are the tensors given as ``full``.
        header: what this rank sent with the gather that the part is of.
        epoch: of the weights that are kept here.
    """

    def __init__(self, comm: Communicator, full: list[torch.Tensor], owner: Owner) -> None:
        self.comm = comm
        sizes = [t.numel() // comm.world_size for t in full]
        self._sources = [t.narrow(0, comm.rank * size, size) for t, size in zip(full, sizes, strict=True)]
        self._slab = Slab(sum(sizes), full[0].device, "secondary shard", owner)
        self._slab.lease()
        ends = torch.tensor(sizes, device="cpu").cumsum(0).tolist()
        self.inputs = [self._slab.byte_view(end - size, size) for end, size in zip(ends, sizes, strict=True)]
        self._slab.release()
        self.header = torch.zeros(0, dtype=torch.uint8, device="cpu")
        self.epoch = NEVER

    def keep(self, epoch: int, header: torch.Tensor) -> None:
        """Copy this rank's part of the full weights, which must be there."""
        self._slab.lease()
        if not self.header.numel():
            self.header = torch.empty_like(header)
        foreach_copy_([*self.inputs, self.header], [*self._sources, header])
        self.epoch = epoch

    def drop(self) -> None:
        self.epoch = NEVER
        self._slab.release()
