"""One round of a step on whole tensors: it collects parts on owners and sends new values or updates back.

``moves`` plans the moves. ``owners`` makes the step and has its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.engine.compat import foreach_copy_
from shardwright.optim.moves import MeshRanks, Mover, Moving, StepItem, StepRound
from shardwright.optim.owned import WholeParameter

Locals = dict[int, torch.Tensor]  #: local tensors with their gradients, by the parameter's index
Apply = Callable[
    [int, torch.Tensor, torch.Tensor], None
]  #: applies to index and local tensor a part of the update


class RankRound:
    """One round on this rank.

    Attributes:
        mine: the items that this rank owns.
    """

    def __init__(self, one: StepRound, world: MeshRanks, owned: Sequence[WholeParameter]) -> None:
        self._rank = world.rank
        self.mine = [item for item in one.items if item.owner == world.rank]
        #: Items that are whole on this rank's device. They are stepped in place.
        self._in_place = {item.key for item in self.mine if item.is_whole and not owned[item.key].on_host}
        self._there = Mover(one.to_owners(world), world, moves=any(not item.is_whole for item in one.items))
        self._back = Mover(one.back(world), world, moves=world.size > 1)

    def send_gradients(self, locals_: Locals, device: torch.device) -> Moving | None:
        """Begin to send gradients to owners, and the values that they need."""
        pieces: list[Any] = []
        for piece, which, *_ in self._there.sends:
            local = locals_[piece.item.key]
            pieces.append(local if which else local.grad)
        return self._there.start(pieces, device)

    def assemble(self, coming: Moving | None, locals_: Locals, device: torch.device) -> Locals:
        """The whole tensors of this rank with their gradients, by index. Items that send updates have
        gradients in place of the tensors."""
        gradients: Locals = {}
        values: Locals = {}
        for item in self.mine:
            local: Any = locals_[item.key]
            gradients[item.key] = self._with_own_part(item, local.grad, device)
            if not item.sends_update:
                values[item.key] = self._with_own_part(item, local, device)
        targets = []
        for piece, which, *_ in self._there.receives:
            full = (values if which else gradients)[piece.item.key]
            targets.append(piece.item.parts.view(full, piece.part))
        self._there.finish(coming, targets)
        for index, full in values.items():
            if gradients[index].dtype != full.dtype:
                full.grad_dtype = gradients[index].dtype
            full.grad = gradients[index]
        return gradients | values

    def _with_own_part(self, item: StepItem, local: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The whole tensor with this rank's part: ``local`` itself if it is whole, else new memory."""
        if item.key in self._in_place:
            return local.contiguous().view(item.shape)
        full = torch.empty(item.shape, dtype=local.dtype, device=device)
        item.parts.view(full, item.parts.of[self._rank]).copy_(local, non_blocking=True)
        return full

    def send_back(self, whole: Locals, locals_: Locals, device: torch.device, apply: Apply) -> Moving | None:
        """Begin to send the new values or updates to the other ranks, and write this rank's part."""
        pieces = [piece.item.parts.view(whole[piece.item.key], piece.part) for piece, *_ in self._back.sends]
        moving = self._back.start(pieces, device)
        for item in self.mine:
            local, full = locals_[item.key], whole[item.key]
            part = item.parts.view(full, item.parts.of[self._rank])
            if item.sends_update:
                apply(item.key, local, part)
            elif full.data_ptr() != local.data_ptr():  # else it was stepped in place
                local.copy_(part, non_blocking=True)
        return moving

    def receive(self, moving: Moving | None, locals_: Locals, apply: Apply) -> None:
        """Write the new values from other owners, or apply their updates."""
        items = [piece.item for piece, *_ in self._back.receives]
        locals_of_items = [locals_[item.key] for item in items]
        arrived = self._back.arrived(moving, [local.shape for local in locals_of_items])
        new_values = []
        for item, local, source in zip(items, locals_of_items, arrived, strict=True):
            if item.sends_update:
                apply(item.key, local, source)
            else:
                new_values.append((local, source))
        if new_values:
            foreach_copy_([local for local, _ in new_values], [source for _, source in new_values], True)
