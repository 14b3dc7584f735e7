"""In which order the units of a model run, as numbers: what one root call shows is the guess for the next."""

from __future__ import annotations


class Order:
    """That of each caller, the unit whose call is the outermost.

    Attributes:
        seen: units of the root call under way, in their order.
        left: those that backward may come back to, in the order in which they left forward.
    """

    __slots__ = ("_expected", "_first", "_last", "_place", "left", "seen")

    def __init__(self, first: list[int]) -> None:
        self._first = first  #: the guess for a caller that was not called yet
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
        """A unit runs. Returns which ones are expected to run after it, ``ahead`` of them at most."""
        self.seen.append(number)
        expected, place = self._expected, self._place
        if place < len(expected) and expected[place] == number:
            self._place = place + 1
        else:  # not the order of last time: look for this unit further on, else guess nothing more in this call
            later = expected[place:]
            self._place = place + later.index(number) + 1 if number in later else len(expected)
        return expected[self._place : self._place + ahead]

    def end(self, caller: int) -> None:
        """The root call has returned."""
        self._last[caller] = self.seen

    def forget(self) -> None:
        """Guess nothing in the next root calls."""
        self._last.clear()
