"""The values of a unit's parameters: which parameters have none yet, and whether ranks were compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.tensors.edits.unset import Unset, blank, has_values, mark, mark_of, unmark
from shardwright.engine.tensors.parameter import ManagedParameter


class Values:
    """The values of one unit.

    Attributes:
        synced: whether the ranks' values were made the same before they were cut.
        checked: whether they were compared.
    """

    __slots__ = ("checked", "synced", "unset")

    def __init__(self) -> None:
        self.synced = False
        self.checked = False
        #: Parameters without values: the original of each, and counts of edits since.
        self.unset: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}

    def expect(self, p: ManagedParameter, source: torch.Tensor, unit: str) -> None:
        """Note that the shard has no values of ``p`` until user code writes them. ``source`` is the original.

        The shard is filled with NaN, so that early reads do not look like values. Edits of it raise an error.
        """
        blank(p.local)
        mark(p.local, Unset(f"parameter {p.name!r} of unit {unit!r}", p.sharded.numel()))
        self.unset[p.sharded] = source, p.sharded._version + p.local._version

    def missing(self, parameters: Sequence[ManagedParameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Sharded parameters without values, and for each its original from before sharding."""
        local_of_sharded = {p.sharded: p.local for p in parameters} if self.unset else {}
        for sharded, (_, version) in list(self.unset.items()):
            if sharded in local_of_sharded and not _lacks(sharded, local_of_sharded[sharded], version):
                del self.unset[sharded]
        return {q: source for q, (source, _) in self.unset.items()}

    def give_up(self, moved: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """As :meth:`missing` for parameters that another unit adopts. Forgets them here."""
        entries = {p: self.unset.pop(p) for p in moved if p in self.unset}
        return {p: source for p, (source, version) in entries.items() if _lacks(p, local_of(p), version)}


def _lacks(sharded: nn.Parameter, local: torch.Tensor, version: int) -> bool:
    """Whether it still has no values. If it has some, its mark is removed.

    ``local`` and ``version`` are the tensor with the mark, and the count of edits at the mark.
    """
    now = local_of(sharded)  # differs from the marked tensor if ``.data`` was assigned
    if mark_of(now) is not None:
        filled = has_values(now)
        if filled is None:  # then any edit counts
            filled = sharded._version + local._version != version
        if not filled:
            return True
    unmark(now)
    return False
