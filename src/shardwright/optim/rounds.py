"""One round of a step on whole tensors: it collects parts on owners and sends new values back.

``moves`` plans the moves. ``owners`` makes the step and has its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.optim.moves import Mover, Moving, Round, World
from shardwright.optim.owned import Owned

Locals = dict[int, torch.Tensor]  #: local tensors with their gradients, by the parameter's index


class RankRound:
    """One round on this rank.

    Attributes:
        mine: the items that this rank owns.
    """

    def __init__(self, one: Round, world: World, owned: Sequence[Owned]) -> None:
        self._rank = world.rank
        self.mine = [item for item in one.items if item.owner == world.rank]
        #: Items that are whole on this rank's device. They are stepped in place.
        self._in_place = {item.key for item in self.mine if item.is_whole and not owned[item.key].on_host}
        self._there = Mover(one.to_owners(world), world, moves=any(not item.is_whole for item in one.items))
        self._back = Mover(one.back(world), world, moves=world.size > 1)

    def send_gradients(self, locals_: Locals, device: torch.device) -> Moving | None:
        """Begin to send gradients and values to owners."""
        pieces: list[Any] = []
        for piece, which, *_ in self._there.sends:
            local = locals_[piece.item.key]
            pieces.append(local if which else local.grad)
        return self._there.start(pieces, device)

    def assemble(self, coming: Moving | None, locals_: Locals, device: torch.device) -> Locals:
        """The whole tensors of this rank with their gradients, by index."""
        whole: Locals = {}
        for item in self.mine:
            local = locals_[item.key]
            gradient: Any = local.grad
            in_place = item.key in self._in_place
            if in_place:
                full = local.contiguous().view(item.shape)
            else:
                full = torch.empty(item.shape, dtype=local.dtype, device=device)
            if gradient.dtype != full.dtype:
                full.grad_dtype = gradient.dtype
            if in_place:
                full.grad = gradient.contiguous().view(item.shape)
            else:
                full.grad = torch.empty(item.shape, dtype=gradient.dtype, device=device)
                part = item.parts.of[self._rank]
                item.parts.view(full, part).copy_(local, non_blocking=True)
                item.parts.view(full.grad, part).copy_(gradient, non_blocking=True)
            whole[item.key] = full
        targets = []
        for piece, which, *_ in self._there.receives:
            full = whole[piece.item.key]
            target: Any = full if which else full.grad
            targets.append(piece.item.parts.view(target, piece.part))
        self._there.finish(coming, targets)
        return whole

    def send_back(self, whole: Locals, locals_: Locals, device: torch.device) -> Moving | None:
        """Begin to send the new values to the other ranks, and write this rank's part."""
        for item in self.mine:
            local, full = locals_[item.key], whole[item.key]
            if full.data_ptr() != local.data_ptr():  # else it was stepped in place
                local.copy_(item.parts.view(full, item.parts.of[self._rank]), non_blocking=True)
        pieces = [piece.item.parts.view(whole[piece.item.key], piece.part) for piece, *_ in self._back.sends]
        return self._back.start(pieces, device)

    def receive(self, moving: Moving | None, locals_: Locals) -> None:
        """Write the new values from other owners."""
        self._back.finish(moving, [locals_[piece.item.key] for piece, *_ in self._back.receives])
