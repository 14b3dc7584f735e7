"""What goes on in a unit: a frame while a call of it runs, a visit in the graph for its backward, and both together.

All are plain records. What is done with them is decided in the room ``model``.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol


class Listener(Protocol):
    """Who hears when backward comes to a unit and when it has left it."""

    def enter(self, visit: Visit) -> None: ...

    def after_call(self, visit: Visit) -> None: ...

    def close(self, visit: Visit) -> None: ...


class Visit:
    """A unit's part in one root call: how many of its calls the graph holds, and when they began and ended.

    Autograd nodes hold it, so it holds units but never a module, another call's visit or the graph.
    """

    __slots__ = (
        "__weakref__",
        "begin",
        "calls",
        "end",
        "endless",
        "generation",
        "guests",
        "hosts",
        "lasting",
        "listener",
        "order",
        "place",
        "remaining",
        "returns",
        "unit",
    )

    def __init__(self, unit: Any, listener: Listener, order: list[int], begin: int) -> None:
        self.unit = unit
        self.listener = listener
        self.generation: int = (
            unit.weights.generation
        )  #: of the unit's memory; a graph over an earlier one can't be run any more
        self.order = order  #: numbers of the units in the order in which they left forward
        self.place = -1  #: of this unit in that order
        self.begin = begin
        self.end = begin
        self.calls = 0
        self.remaining = 0  #: once backward is here: calls whose inputs it has not reached yet
        self.returns = False  #: whether backward may come, through an output
        self.endless = False  #: no input needs a gradient, so nothing tells when backward is through
        self.lasting = False  #: whether the graph has copies of the weights, so that backward needs no gather
        self.guests: list[Visit] = []  #: of units whose weights were read inside this one's forward
        self.hosts: list[Visit] = []  #: of units inside whose forward this one ran: backward may go on there

    def before_backward(self) -> None:
        self.listener.enter(self)

    def after_backward(self) -> None:
        self.listener.after_call(self)

    def close(self) -> None:
        self.listener.close(self)


class Frame:
    """A call of a unit that is under way."""

    __slots__ = ("containers", "entry", "first_own", "guests", "unit", "visit")

    def __init__(self, unit: Any, entry: int) -> None:
        self.unit = unit
        self.visit: Visit | None = None
        #: Number of the first autograd node that this call may have made, perhaps the engine's.
        self.entry = entry
        #: Number of the first that the module itself makes, if it makes one.
        self.first_own = entry
        self.containers: list[Any] = []  #: inputs that the call may have put tensors into
        self.guests: list[Any] = []  #: units whose weights are read inside the call


class Activity:
    """What a unit is in the middle of.

    Attributes:
        calls: forward calls under way, of this unit or of others that read its weights.
        to_run: ids of modules of a unit of several that have not run yet in its forward.
        visits: whose backward is under way.
        entered: whether the backward now running has reached this unit.
        unfinished: visits whose backward may come yet, where something is kept for it.
    """

    __slots__ = ("calls", "entered", "to_run", "unfinished", "visits")

    def __init__(self) -> None:
        self.calls = 0
        self.to_run: set[int] = set()
        self.visits: set[Visit] = set()
        self.entered = False
        self.unfinished: weakref.WeakSet[Visit] = weakref.WeakSet()

    @property
    def busy(self) -> bool:
        """Whether a forward or a backward of the unit is under way."""
        return bool(self.calls or self.visits)

    def forget_calls(self) -> None:
        """The root call has failed: nothing of it is under way any more."""
        self.calls = 0
        self.to_run.clear()

    def forget(self) -> None:
        """A forward or backward has failed."""
        self.forget_calls()
        self.visits.clear()
        self.entered = False
