"""Gradients of offloaded units on their way to the CPU's memory."""

from __future__ import annotations

import weakref

from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import complete, land


class Arrivals:
    """Units of a model whose gradients are on their way to the host, the oldest first."""

    def __init__(self) -> None:
        self._units: list[weakref.ref[Unit]] = []

    def _list(self) -> list[Unit]:
        return [unit for ref in self._units if (unit := ref()) is not None and unit.gradients.arriving]

    def add(self, unit: Unit) -> None:
        """Add a unit. Releases the device's memory of earlier units, so that only one unit's gradients are there."""
        for other in self._list():
            other.gradients.leave_device()
        unit.gradients.begin_arrival()
        if unit.gradients.arriving:
            self._units = [ref for ref in self._units if ref() is not unit] + [weakref.ref(unit)]

    def poll(self) -> None:
        """Deliver gradients that have arrived, and step their units."""
        for unit in self._list():
            if not unit.gradients.has_arrived():
                return
            land(unit)

    def end_backward(self) -> None:
        """Wait for all gradients that the user may read now. Units to step are waited for when they are needed."""
        self.poll()
        for unit in self._list():
            unit.gradients.leave_device()
            if unit.stepping is None or not unit.stepping.due or unit.activity.calls:
                land(unit)
            else:
                unit.gradients.overdue = True
                unit.stepping.mark(unit, [p.sharded for p in unit.parameters if p.sharded.requires_grad])

    def recover(self) -> None:
        """After a failed backward: keep the gradients of the backward before. Units drop the failed ones themselves."""
        for unit in self._list():
            if unit.gradients.overdue:
                complete(unit)
