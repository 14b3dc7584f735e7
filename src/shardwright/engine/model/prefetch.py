"""Chooses the units to gather ahead: the next units of the last order, or the units that the user has set."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from shardwright.engine.base.visit import Visit
from shardwright.engine.model.order import Order
from shardwright.engine.unit.unit import Unit


class Prefetch:
    """The prefetch of one model."""

    __slots__ = ("_depth", "_nbytes", "_order", "_units")

    def __init__(self, units: list[weakref.ref[Unit]], order: Order, depth: int, nbytes: int | None) -> None:
        self._units = units
        self._order = order
        self._depth = depth  #: units
        self._nbytes = nbytes  #: limit of their bytes; None: no limit

    def after(self, unit: Unit) -> list[Unit]:
        """Units to gather beside a unit's forward."""
        numbers = self._order.reach(unit.number, self._depth)
        named = unit.settings.forward_prefetch
        return [u for ref in named if (u := ref()) is not None] if named else self._within_budget(numbers)

    def before(self, visit: Visit) -> list[Unit]:
        """Units to gather beside a unit's backward."""
        named = visit.unit.settings.backward_prefetch
        if named:
            return [u for ref in named if (u := ref()) is not None]
        if visit.place <= 0:
            return []
        first = max(0, visit.place - self._depth)
        return self._within_budget(reversed(visit.order[first : visit.place]))

    def _within_budget(self, numbers: Iterable[int]) -> list[Unit]:
        """The first of these units that fit into the limit of bytes."""
        units: list[Unit] = []
        nbytes = 0
        for number in numbers:
            unit = self._units[number]()
            if unit is None:
                break
            if self._nbytes is not None:
                nbytes += unit.weights.copy.slab.nbytes
                if nbytes > self._nbytes:
                    break
            units.append(unit)
        return units
