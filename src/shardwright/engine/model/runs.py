"""Runs of direct uses: how long a unit stays gathered whose weights are read without a call of the unit.

A run is the time from a unit's gather for such a use to its release. The order of the uses in one root call is the
guess for the next: a unit is released after the last use of a run. Without a guess, or where the order has changed, it
is released when runs of two other units have begun since its last use, and at the latest when the root call returns.
"""

from __future__ import annotations

from shardwright.engine.base.visit import Visit
from shardwright.engine.unit.unit import Unit

#: Without a guess a run ends when so many others have begun since its last use.
_LATER = 2
#: A run goes on over uses of at most so many other units, as where several towers take turns.
_BETWEEN = 2


class Run:
    """A run of uses of one unit's weights.

    Attributes:
        unit: the unit.
        visit: the place of these uses in the graph, if any has a graph.
        last: how many runs had begun at the last use.
        place: the place of the last use among all uses of the root call.
    """

    __slots__ = ("last", "place", "unit", "visit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.visit: Visit | None = None
        self.last = self.place = 0


class Runs:
    """The runs of a model's running root call.

    Attributes:
        running: by number of the unit.
    """

    __slots__ = ("_begun", "_caller", "_ends", "_expected", "_last", "_seen", "running")

    def __init__(self) -> None:
        self.running: dict[int, Run] = {}
        self._begun = 0
        self._caller = -1
        self._seen: list[
            int
        ] = []  #: units in the order of their uses and calls in this root call, from the first use
        self._last: dict[int, tuple[list[int], list[bool]]] = {}  #: by caller: uses, and which end a run
        self._expected: list[int] = []
        self._ends: list[bool] = []

    def begin(self, caller: int) -> None:
        """A root call begins."""
        self._caller, self._begun = caller, 0
        self._seen = []
        self._expected, self._ends = self._last.get(caller, ([], []))

    def use(self, unit: Unit) -> tuple[Run, list[Run]]:
        """Note a use. Returns its run, and the runs that end before it because others have begun."""
        run, over = self.running.get(unit.number), []
        if run is None:
            self._begun += 1
            if not self._guesses():
                over = [r for r in self.running.values() if self._begun - r.last >= _LATER]
            run = self.running[unit.number] = Run(unit)
        run.last, run.place = self._begun, len(self._seen)
        self._seen.append(unit.number)
        return run, over

    def call(self, number: int) -> None:
        """Note a call of a unit, which reads its weights, too."""
        if self._seen:
            self._seen.append(number)

    def ends_with_last(self, run: Run) -> bool:
        """Return whether the run ends with its last use, as in the last root call. False after a change of order."""
        place = run.place
        if self._guesses() and place < len(self._expected) and self._expected[place] == self._seen[place]:
            return self._ends[place]
        self._expected = []  # another order than last time: no guess in the rest of this root call
        return False

    def _guesses(self) -> bool:
        return bool(self._expected)

    def end(self) -> list[Run]:
        """End the root call. Returns the runs that it leaves."""
        if self._seen or self._caller in self._last:
            self._last[self._caller] = self._seen, _ends_of(self._seen)
        return self.forget()

    def forget(self) -> list[Run]:
        """Drop all runs, and return them."""
        left = list(self.running.values())
        self.running.clear()
        return left


def _ends_of(uses: list[int]) -> list[bool]:
    """Return for each use whether the unit's run ends with it: it is not used again, or not before many others."""
    ends = [True] * len(uses)
    later: dict[int, int] = {}
    for place in range(len(uses) - 1, -1, -1):
        again = later.get(uses[place])
        if again is not None:
            ends[place] = len(set(uses[place + 1 : again])) > _BETWEEN
        later[uses[place]] = place
    return ends
