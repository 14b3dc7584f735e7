"""Writes edits of full weights into the shards: edits in place, through ``.data``, and with a codec's rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwright.engine.memory import Owner
from shardwright.engine.tensors.parameter import ManagedParameter
from shardwright.engine.weights.full_weights import Copies

#: Called with a parameter's name, and a function that makes a fingerprint of its edit.
Compare = Callable[[str, Callable[[], torch.Tensor]], None]
_PIECE = 1 << 20  #: elements that are hashed at once


def fingerprint_of(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of the bits of a tensor: an int64 tensor without dimensions on its device, the same for equal bits."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    size = next(n for n in (8, 4, 2, 1) if flat.numel() % n == 0)
    words = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(words.split(_PIECE)):
        place = torch.arange(number * _PIECE, number * _PIECE + piece.numel(), device=tensor.device)
        # An odd factor for each place, so that values that have changed places differ.
        total += ((piece.long() * 0x9E3779B97F4A7C1) * (2 * place + 1) ^ (piece.long() >> 7)).sum()
    return total


class FullEdits:
    """The edits in one build of a unit's memory.

    Attributes:
        handed_out: full parameters whose ``.data`` user code has got, so that edits may be unnoticed.
    """

    __slots__ = ("_before", "_copies", "_decoded", "_owner", "_parameters", "handed_out", "in_place")

    def __init__(self, parameters: list[ManagedParameter], copies: Copies, owner: Owner) -> None:
        self._parameters = parameters
        self._copies = copies
        self._owner = owner
        self.handed_out: set[int] = set()  #: full parameters whose ``.data`` user code has got
        self._before: dict[int, torch.Tensor] = {}  #: for those, a fingerprint of the weights at that time
        #: Parameters whose full form is the shard, so that nothing is written back.
        self.in_place = [i for i, p in enumerate(parameters) if p.in_place]
        self._decoded: dict[int, torch.Tensor] = {}  #: for those, this rank's part after the codec

    def give(self, full: torch.Tensor, there: bool) -> None:
        """Note that user code gets the ``.data`` of a full parameter. ``there``: its weights are in the slab."""
        if any(p.full is full and p.in_place for p in self._parameters):
            if id(full) not in self._before:  # it is the shard itself, so nothing else shows an edit
                self._before[id(full)] = fingerprint_of(full)
            return
        self.handed_out.add(id(full))
        if there:
            self._remember(full)

    def arrive(self) -> None:
        """After weights were gathered."""
        self.leave()
        for p in self._parameters:
            if id(p.full) in self.handed_out:
                self._remember(p.full)

    def leave(self) -> None:
        """After the weights are released."""
        self._decoded.clear()
        self._before.clear()

    def expected(self) -> bool:
        """Whether there may be edits."""
        return bool(self.handed_out) or self._copies.current.counters.moved()

    def write_back(self, there: bool, newer: set[int], compare: Compare) -> bool:
        """Write edits into the shards, as in a plain model. Returns whether there may have been any.

        Args:
            there: whether the weights are in the slab.
            newer: indices of parameters whose shards were edited after the gather.
            compare: called with each edited parameter's name, and a function that makes a fingerprint of its edit.

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
            if (edited or id(p.full) in handed_out) and i not in newer and not p.in_place:
                compare(p.name, lambda p=p, edited=edited: self._fingerprint(p, edited))  # type: ignore[misc]
                p.write_back(self._gathered_part(p))
        return True

    def compare_in_place(self, changed: list[int], compare: Compare) -> None:
        """Compare edits of full forms that are the shards. ``changed``: indices of those with newer versions."""
        for i in self.in_place:
            p, edited = self._parameters[i], i in changed
            if edited or id(p.full) in self._before:
                compare(p.name, lambda p=p, edited=edited: self._fingerprint(p, edited))  # type: ignore[misc]
        self._before.clear()

    def _fingerprint(self, p: ManagedParameter, edited: bool) -> torch.Tensor:
        """A hash of an edit; 0 if user code only got ``.data`` and has changed nothing."""
        now, before = fingerprint_of(p.view), self._before.get(id(p.full))
        return now if edited or before is None else torch.where(now == before, 0, now)

    @property
    def _is_decoded(self) -> bool:
        """Whether full weights may have the rounding of a codec."""
        return self._copies.transport.codec is not None and self._copies.current.gather.comm.group is not None

    def _remember(self, full: torch.Tensor) -> None:
        """Store what shows an edit that moves no version counter: a fingerprint, and with a codec the values."""
        key = id(full)
        if (
            key not in self._before
            and (p := next((p for p in self._parameters if p.full is full), None)) is not None
        ):
            self._before[key] = fingerprint_of(p.view)
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
