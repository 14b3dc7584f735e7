"""The values of a unit's parameters: which parameters have none yet, and whether ranks were compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwright._torch import local_of
from shardwright.engine.tensors.parameter import ManagedParameter
from shardwright.engine.tensors.unset import Unset, blank, has_values, mark, mark_of, unmark


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
        if self.unset:
            by_sharded = {p.sharded: p for p in parameters}
            for sharded, (_, version) in list(self.unset.items()):
                if sharded not in by_sharded:
                    continue
                local = local_of(sharded)  # differs from the unit's if ``.data`` was assigned
                if mark_of(local) is not None:
                    filled = has_values(local)
                    if filled is None:  # then any edit counts
                        filled = sharded._version + by_sharded[sharded].local._version != version
                    if not filled:
                        continue
                unmark(local)
                del self.unset[sharded]
        return {q: source for q, (source, _) in self.unset.items()}
