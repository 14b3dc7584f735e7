"""Writes edits of full weights into the shards: edits in place, through ``.data``, and with a codec's rounding."""

from __future__ import annotations

import torch

from shardwright.engine.tensors.parameter import ManagedParameter
from shardwright.engine.weights.full_weights import Copies
from shardwright.memory import Owner


class FullEdits:
    """The edits in one build of a unit's memory.

    Attributes:
        handed_out: full parameters whose ``.data`` user code has got, so that edits may be unnoticed.
    """

    __slots__ = ("_copies", "_decoded", "_owner", "_parameters", "handed_out")

    def __init__(self, parameters: list[ManagedParameter], copies: Copies, owner: Owner) -> None:
        self._parameters = parameters
        self._copies = copies
        self._owner = owner
        self.handed_out: set[int] = set()  #: full parameters whose ``.data`` user code has got
        self._decoded: dict[int, torch.Tensor] = {}  #: for those, this rank's part after the codec

    def give(self, full: torch.Tensor, there: bool) -> None:
        """Note that user code gets the ``.data`` of a full parameter. ``there``: its weights are in the slab."""
        if any(p.full is full and p.in_place for p in self._parameters):
            return
        self.handed_out.add(id(full))
        if there:
            self._remember(full)

    def arrive(self) -> None:
        """After weights were gathered."""
        self._decoded.clear()
        for full in self._copies.current.counters.tensors:
            if id(full) in self.handed_out:
                self._remember(full)

    def leave(self) -> None:
        """After the weights are released."""
        self._decoded.clear()

    def expected(self) -> bool:
        """Whether there may be edits."""
        return bool(self.handed_out) or self._copies.current.counters.moved()

    def write_back(self, there: bool, newer: set[int]) -> bool:
        """Write edits into the shards, as in a plain model. Returns whether there may have been any.

        Args:
            there: whether the weights are in the slab.
            newer: indices of parameters whose shards were edited after the gather.

        Raises:
            RuntimeError: the full form and the shard of one parameter were edited.
        """
        moved, handed_out = self._copies.current.counters.look(), self.handed_out
        if not there:
            return False
        for i, p in enumerate(self._parameters):
            edited = any(id(t) in moved for t in p.counters)
            if edited and i in newer:
                raise RuntimeError(
                    f"Parameter {p.name!r} of unit {self._owner.name!r} was changed in place while it was full, and "
                    "its shard was changed after that. Only one of the changes could be kept. Call reshard() between "
                    "the two changes."
                )
            if (edited or id(p.full) in handed_out) and i not in newer:
                p.write_back(self._gathered_part(p))
        return True

    @property
    def _is_decoded(self) -> bool:
        """Whether full weights may have the rounding of a codec."""
        return self._copies.transport.codec is not None and self._copies.current.gather.comm.group is not None

    def _remember(self, full: torch.Tensor) -> None:
        """Store the gathered values, because with a codec the shard alone cannot show an edit."""
        key = id(full)
        if not self._is_decoded or key in self._decoded:
            return
        p = next(p for p in self._parameters if p.full is full)
        if self._copies.current.counters.intact(p.counters):
            self._decoded[key] = p.cut.of_full(p.view.detach()).clone()

    def _gathered_part(self, p: ManagedParameter) -> torch.Tensor | None:
        """The gathered values of this rank's part; None: they equal the shard in the compute dtype."""
        if not self._is_decoded:
            return None
        codec = self._copies.transport.codec
        part = self._decoded.get(id(p.full))
        if part is None:
            raise RuntimeError(
                f"Parameter {p.name!r} of unit {self._owner.name!r} was changed in place while it was full. The "
                f"gathered copy has the rounding of {codec!r}, so the change cannot be separated from it. Change the "
                "parameter between steps, or call set_all_gather_codec(None)."
            )
        return part
