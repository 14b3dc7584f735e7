"""The running reductions of a model: one after another, in the same order on every rank."""

from __future__ import annotations

import weakref

from shardwright.engine.model.arrivals import Arrivals
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import continue_reduction, finish_reduction, land


class Reductions:
    """The running reductions of one model.

    Attributes:
        capacity: the largest number of packed buffers at one time.
        arrivals: units whose gradients are on their way to the CPU's memory.
    """

    __slots__ = ("_scattering", "_summing", "_units", "arrivals", "capacity")

    def __init__(self, units: list[weakref.ref[Unit]]) -> None:
        self._units = units
        self.capacity = 1
        self.arrivals = Arrivals()
        self._scattering: list[int] = []  #: units whose reduce-scatter runs, the oldest first
        self._summing: list[int] = []  #: units whose gradients are being summed over the replicas

    def make_room(self, number: int) -> None:
        """Finish reductions until a new one may begin: fewer than ``capacity`` buffers, at most one sum over replicas.

        Reductions of unit ``number`` are finished, because a unit has only one place for its result and may be reduced
        twice in one backward.
        """
        if number in self._scattering or number in self._summing:
            self.finish()
        begins = self._units[number]()
        if begins is not None and begins.gradients.arriving:
            land(begins)
        while len(self._scattering) >= self.capacity:
            oldest = self._scattering.pop(0)
            unit = self._units[oldest]()
            if unit is None:
                continue
            self._finish_sums()
            if continue_reduction(unit):
                self._summing.append(oldest)
            else:
                finish_reduction(unit)
        if begins is not None and begins.site.reads is not None:
            self.arrivals.poll()

    def add(self, number: int) -> None:
        """Add a unit whose reduce-scatter runs."""
        self._scattering.append(number)

    def collect(self) -> None:
        """Free the buffers of collectives that have ended. Gradients are delivered later, at the same place on all
        ranks."""
        for number in self._scattering:
            if (unit := self._units[number]()) is not None:
                unit.gradients.collect()

    def _finish_sums(self) -> None:
        while self._summing:
            if (unit := self._units[self._summing.pop(0)]()) is not None:
                finish_reduction(unit)

    def finish(self) -> None:
        """Wait for all running reductions, and deliver them."""
        numbers, self._scattering = self._scattering, []
        units = [u for number in numbers if (u := self._units[number]()) is not None]
        for unit in units:
            continue_reduction(unit)
        self._finish_sums()
        for unit in units:
            finish_reduction(unit)

    def forget(self) -> None:
        """Drop all after a failed backward. Units drop their own results."""
        self._scattering, self._summing = [], []
