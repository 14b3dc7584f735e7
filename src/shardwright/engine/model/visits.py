"""The running calls of a model's units, and their visits in the graph."""

from __future__ import annotations

import weakref
from collections import deque

from shardwright.engine.base.clock import Clock
from shardwright.engine.base.visit import Frame, Listener, Visit
from shardwright.engine.model.order import Order
from shardwright.engine.unit.unit import Unit


class Visits:
    """The calls and visits of one model.

    Attributes:
        frames: running calls of units, the innermost last.
        open: visits whose backward runs.
    """

    __slots__ = ("_clock", "_made", "_of_call", "_order", "_unmarked", "frames", "open")

    def __init__(self, clock: Clock, order: Order) -> None:
        self._clock = clock
        self._order = order
        self.frames: list[Frame] = []
        self.open: list[Visit] = []
        self._of_call: dict[int, Visit] = {}  #: by unit
        self._made: list[weakref.ref[Visit]] = []  #: of forwards
        self._unmarked: deque[Visit] = deque(maxlen=256)  #: which no node of a graph holds

    def of(self, unit: Unit, listener: Listener, recomputing: bool) -> Visit:
        """The visit of ``unit`` in this root call. A recomputed call is a separate visit, without a place in the
        order."""
        if recomputing:
            return Visit(unit, listener, [], self._clock.tick())
        visit = self._of_call.get(unit.number)
        if visit is None:
            visit = Visit(unit, listener, self._order.left, self._clock.tick())
            self._of_call[unit.number] = visit
            self._made.append(weakref.ref(visit))
        return visit

    def hold(self, visit: Visit) -> None:
        """Hold the visit of a call without marks in the graph, which otherwise nothing would hold."""
        self._unmarked.append(visit)

    def called(self) -> list[Visit]:
        """The visits of calls whose graphs exist."""
        return [visit for ref in self._made if (visit := ref()) is not None and visit.spans]

    def apart(self, unit: Unit, listener: Listener, ordered: bool) -> Visit:
        """A separate visit for uses of the weights without a call. ``ordered``: it gets a place in the order."""
        return Visit(unit, listener, self._order.left if ordered else [], self._clock.tick())

    def innermost(self) -> Visit | None:
        """The visit of the innermost running call that has one."""
        return next((f.visit for f in reversed(self.frames) if f.visit is not None), None)

    def around(self, frame: Frame) -> Visit | None:
        """The visit of the innermost call around ``frame`` that has one."""
        for other in reversed(self.frames):
            if other is not frame and other.visit is not None and other.visit.unit is not frame.unit:
                return other.visit
        return None

    def enter(self, visit: Visit) -> None:
        """Backward has reached a visit."""
        self.open.append(visit)

    def close_later(self, visit: Visit) -> None:
        """Close visits whose forward began after the end of the forward of ``visit``.

        Autograd runs nodes in the reverse of the order in which they were made, so it has run all nodes of these
        visits. If no input of a unit needs a gradient, no other event shows this before the end of backward.
        """
        if len(self.open) > 1:  # ``visit`` is one of them
            self._close_begun_after(visit.end)

    def leave(self, visit: Visit) -> None:
        """Backward has left a visit."""
        self.open.remove(visit)
        if self.open:
            self._close_begun_after(visit.begin)

    def close_all(self) -> None:
        """Close all visits at the end of backward."""
        self._close_begun_after(-1)

    def _close_begun_after(self, time: int) -> None:
        """Close these visits, the latest first, for any order in which this rank's backward has reached them."""
        later = [v for v in self.open if v.begin > time]
        for other in sorted(later, key=lambda v: -v.begin) if later else ():
            other.close()

    def end_call(self) -> None:
        """End a root call, which has returned or failed. Only the graph holds its visits now."""
        self._of_call = {}
        self._made = [ref for ref in self._made if ref() is not None]

    def forget(self) -> None:
        """Drop all visits after a failed forward or backward."""
        self.frames.clear()
        self.open.clear()
        self._of_call = {}
