"""The clock of a model. It numbers root calls and backwards."""

from __future__ import annotations


class Clock:
    """
    Attributes:
        call: number of the running root call or backward, or of the time after it.
        begun: root calls so far.
    """

    __slots__ = ("_time", "begun", "call")

    def __init__(self) -> None:
        self.call = 0
        self.begun = 0
        self._time = 0

    @property
    def next_call(self) -> int:
        """The number of the root call that begins next."""
        return self.call + 1

    def begin_call(self) -> None:
        """A root call begins."""
        self.call += 1
        self.begun += 1

    def turn(self) -> None:
        """A backward begins or ends, or a call of another model reads this one's weights."""
        self.call += 1

    def tick(self) -> int:
        self._time += 1
        return self._time
