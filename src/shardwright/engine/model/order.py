"""The order in which the units of a model run, as numbers. The order of one root call is the guess for the next."""

from __future__ import annotations


class Order:
    """The order of units for each caller. The caller is the unit of the outermost call.

    Attributes:
        seen: units of the running root call, in their order.
        left: units that backward may reach, in the order in which they left forward.
    """

    __slots__ = ("_expected", "_first", "_last", "_place", "left", "seen")

    def __init__(self, first: list[int]) -> None:
        self._first = first  #: the guess for a new caller
        self._last: dict[int, list[int]] = {}  #: by caller
        self._expected: list[int] = []
        self._place = 0
        self.seen: list[int] = []
        self.left: list[int] = []

    def begin(self, caller: int) -> None:
        """A root call begins."""
        self._expected = self._last.get(caller, self._first)
        self._place = 0
        self.seen, self.left = [], []

    def reach(self, number: int, ahead: int) -> list[int]:
        """Note that a unit runs. Returns at most ``ahead`` units that are expected to run after it."""
        self.seen.append(number)
        expected, place = self._expected, self._place
        if place < len(expected) and expected[place] == number:
            self._place = place + 1
        else:  # another order than last time: find this unit further on, or stop guessing in this call
            later = expected[place:]
            self._place = place + later.index(number) + 1 if number in later else len(expected)
        return expected[self._place : self._place + ahead]

    def end(self, caller: int) -> None:
        """The root call has returned."""
        self._last[caller] = self.seen

    def forget(self) -> None:
        """Drop all guesses."""
        self._last.clear()
