"""Records of a unit's activity: a frame for each running call, and a visit in the graph for its backward.

All are plain records. The room ``model`` uses them.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol


class Listener(Protocol):
    """Is called when backward reaches a unit and when it has left the unit."""

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
        "marked",
        "order",
        "place",
        "remaining",
        "returns",
        "spans",
        "spared",
        "unit",
    )

    def __init__(self, unit: Any, listener: Listener, order: list[int], begin: int) -> None:
        self.unit = unit
        self.listener = listener
        self.generation: int = (
            unit.weights.generation
        )  #: generation of the unit's memory; a graph over an earlier generation cannot run any more
        self.order = order  #: numbers of the units in the order in which they left forward
        self.place = -1  #: of this unit in that order
        self.begin = begin
        self.end = begin
        self.calls = 0
        self.spared = 0  #: calls whose backward reads no weights
        self.remaining = 0  #: during backward: calls whose inputs it has not reached yet
        self.returns = False  #: whether backward may reach an output
        self.endless = False  #: no input needs a gradient, so no hook shows the end of backward
        self.lasting = False  #: the graph has copies of the weights, so backward needs no gather
        self.spans: list[
            tuple[int, int]
        ] = []  #: by call: the number of its first node, and of the first after it
        self.marked: set[int] = set()  #: numbers of the nodes that have its mark
        self.guests: list[Visit] = []  #: visits of units whose weights this forward read
        self.hosts: list[Visit] = []  #: visits of outer units, where backward may continue

    @property
    def reads_none(self) -> bool:
        """Whether backward reads no weights of the unit."""
        return 0 < self.spared == self.calls

    # The first two are also hooks of nodes, which get gradients.

    def before_backward(self, *gradients: Any) -> None:
        self.listener.enter(self)

    def after_backward(self, *gradients: Any) -> None:
        self.listener.after_call(self)

    def close(self) -> None:
        self.listener.close(self)


class Frame:
    """A running call of a unit."""

    __slots__ = ("containers", "entry", "first_own", "guests", "unit", "visit")

    def __init__(self, unit: Any, entry: int) -> None:
        self.unit = unit
        self.visit: Visit | None = None
        #: Number of the first autograd node that this call may have made, perhaps the engine's.
        self.entry = entry
        #: Number of the first node that the module itself makes, if it makes one.
        self.first_own = entry
        self.containers: list[Any] = []  #: inputs that the call may have put tensors into
        self.guests: list[Any] = []  #: units whose weights are read inside the call


class Activity:
    """The running calls and backwards of a unit.

    Attributes:
        calls: number of running forward calls of this unit, or of other units that read its weights.
        to_run: for a unit of several modules: ids of those that have not run in this forward.
        visits: visits whose backward runs.
        entered: whether the running backward has reached this unit.
        unfinished: visits whose backward may still come and for which memory is kept, weakly.
    """

    __slots__ = ("calls", "entered", "to_run", "unfinished", "visits")

    def __init__(self) -> None:
        self.calls = 0
        self.to_run: set[int] = set()
        self.visits: set[Visit] = set()
        self.entered = False
        self.unfinished: set[weakref.ref[Visit]] = set()

    def expect(self, visit: Visit) -> None:
        """Note that the backward of a visit may come, until its graph is gone."""
        self.unfinished.add(weakref.ref(visit, self.unfinished.discard))

    @property
    def busy(self) -> bool:
        """Whether a forward or a backward of the unit runs."""
        return bool(self.calls or self.visits)

    def forget_calls(self) -> None:
        """Reset the calls, because the root call has failed."""
        self.calls = 0
        self.to_run.clear()

    def forget(self) -> None:
        """Reset all, because a forward or backward has failed."""
        self.forget_calls()
        self.visits.clear()
        self.entered = False
