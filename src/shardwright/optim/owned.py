"""A parameter that one rank steps whole, and its state: the form on the owner, and the outer form on every rank.

``whole_state`` makes the outer form. Nothing here makes a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.engine import RaggedTensor, unit_of
from shardwright.optim import whole_state
from shardwright.optim.host_state import host_of_whole
from shardwright.optim.moves import MeshRanks
from shardwright.optim.updates import Updates


class WholeParameter:
    """A parameter that needs to be whole, and the state that belongs to it.

    Attributes:
        owner: number of the rank in its mesh that steps it.
        updates: how its step is divided. None: it is stepped whole, by the optimizer's own code.
        host: stores its state between steps. None: its state stays on the device on which it is stepped.
        on_host: whether the parameter and its gradient are stored there, too.
        state: on the owner the state for the optimizer's own code; on other ranks empty.
        description: the description of the state, which every rank has.
        seen: the values of the outer form. With them the next step notices loaded or edited values.
        shown_leaves: the values of ``state`` that the outer form shows. With them a step's new tensors are noticed.
    """

    __slots__ = (
        *("cost", "description", "host", "index", "name", "on_host", "owner", "p", "seen", "shown_leaves"),
        *("state", "updates"),
    )

    def __init__(
        self,
        index: int,
        name: str,
        p: DTensor | RaggedTensor,
        cost: float,
        updates: Updates | None,
        owner: int,
    ) -> None:
        self.index, self.name, self.p, self.cost, self.owner = index, name, p, cost, owner
        unit = unit_of(p)
        self.host = host_of_whole(p)
        self.on_host = unit is not None and unit.host is not None
        # Values on the host travel to the owner's device. An update would be applied on the CPU, which may round
        # differently.
        self.updates = None if self.on_host else updates
        self.state: dict[str, Any] = {}
        self.description: dict[str, Any] = {}
        self.seen: list[Any] = []
        self.shown_leaves: list[Any] = []

    def settle(self, world: MeshRanks, outer: Any) -> None:
        """Adopt state that was loaded or edited. If it is sharded in another way, all ranks communicate."""
        state = outer.get(self.p) or {}
        if _same(whole_state.leaves(state), self.seen):
            return
        state = whole_state.settled(state, world, self.owner)
        self.state = whole_state.inside(state) if self.owner == world.rank else {}
        self.shown_leaves = list(whole_state.leaves(self.state))
        self.description = whole_state.described(state)
        self.show(state, outer)

    def show(self, state: dict[str, Any], outer: Any) -> None:
        """Put the outer form of the state into ``outer``."""
        if state or self.p in outer:
            values = outer[self.p]
            values.clear()
            values.update(state)
        self.seen = list(whole_state.leaves(state))

    def show_replaced(self, world: MeshRanks, outer: Any) -> None:
        """On the owner: if a step has replaced values of the state, show the new values."""
        if not _same(whole_state.leaves(self.state), self.shown_leaves):
            state, self.state = whole_state.shown(self.state, world, self.owner)
            self.shown_leaves = list(whole_state.leaves(self.state))
            self.show(state, outer)

    def adopt(self, description: dict[str, Any], numbers: list[float], world: MeshRanks, outer: Any,
              device: torch.device) -> None:  # fmt: skip
        """Adopt the owner's description of the state. Other ranks show it with the owner's numbers."""
        previous, self.description = self.description, description
        if self.owner == world.rank:
            return
        if previous == description:
            state = dict(outer[self.p])
        else:
            state = whole_state.filled(description, device, world, self.owner)
        self.show(whole_state.set_numbers(state, iter(numbers)), outer)


def _same(values: Iterable[Any], others: list[Any]) -> bool:
    """Whether these are the same objects."""
    values = list(values)
    return len(values) == len(others) and all(a is b for a, b in zip(values, others, strict=True))
