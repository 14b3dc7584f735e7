"""What is known of the values of a unit's parameters: which were never given any, and whether ranks were compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwright._torch import local_of
from shardwright.engine.tensors.parameter import ManagedParameter
from shardwright.engine.tensors.unset import Unset, blank, has_values, mark, mark_of, unmark


class Values:
    """Of one unit.

    Attributes:
        synced: whether the ranks' values were made the same before they were cut.
        checked: whether they were compared.
    """

    __slots__ = ("checked", "synced", "unset")

    def __init__(self) -> None:
        self.synced = False
        self.checked = False
        #: Parameters without values: what each was before it was sharded, and counts of edits since.
        self.unset: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}

    def expect(self, p: ManagedParameter, source: torch.Tensor, unit: str) -> None:
        """The shard holds no values of ``p`` until somebody writes them; ``source`` is what was sharded.

        It is filled with NaN: whoever reads it before must not take it for values. Edits of it are refused.
        """
        blank(p.local)
        mark(p.local, Unset(f"parameter {p.name!r} of unit {unit!r}", p.sharded.numel()))
        self.unset[p.sharded] = source, p.sharded._version + p.local._version

    def missing(self, parameters: Sequence[ManagedParameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Sharded parameters that nobody has given values yet, and what each was before it was sharded."""
        if self.unset:
            by_sharded = {p.sharded: p for p in parameters}
            for sharded, (_, version) in list(self.unset.items()):
                if sharded not in by_sharded:
                    continue
                local = local_of(sharded)  # another one than the unit's since it was assigned to ``.data``
                if mark_of(local) is not None:
                    filled = has_values(local)
                    if filled is None:  # then any edit counts
                        filled = sharded._version + by_sharded[sharded].local._version != version
                    if not filled:
                        continue
                unmark(local)
                del self.unset[sharded]
        return {q: source for q, (source, _) in self.unset.items()}
