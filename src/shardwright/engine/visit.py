"""What a call of a unit leaves behind: a frame while it runs, and a visit in the graph for its backward.

Both are plain records; what is done with them is decided in ``unit.py`` and ``root.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.engine.unit import Unit


class Visit:
    """A unit's part in one root call: how many of its calls the graph holds, and when they began and ended.

    Autograd nodes hold it, so it holds units but never a module, another call's visit or the graph.
    """

    __slots__ = (
        "__weakref__",
        "begin",
        "build",
        "calls",
        "end",
        "endless",
        "guests",
        "hosts",
        "lasting",
        "open",
        "order",
        "place",
        "returns",
        "unit",
    )

    def __init__(self, unit: Unit, order: list[int], begin: int) -> None:
        self.unit = unit
        self.build = unit.build  #: of the unit's memory; a graph over an earlier one can't be run any more
        self.order = order  #: numbers of the units in the order in which they left forward
        self.place = -1  #: of this unit in that order
        self.begin = begin
        self.end = begin
        self.calls = 0
        self.open = 0  #: calls whose backward has not reached the inputs yet
        self.returns = False  #: whether backward may come, through an output
        self.endless = False  #: no input needs a gradient, so nothing tells when backward is through
        self.lasting = False  #: whether the graph has copies of the weights, so that backward needs no gather
        self.guests: list[Visit] = []  #: of units whose weights were read inside this one's forward
        self.hosts: list[Visit] = []  #: of units inside whose forward this one ran: backward may go on there

    def before_backward(self) -> None:
        self.unit.before_backward(self)

    def after_backward(self) -> None:
        self.unit.after_backward(self)


class Frame:
    """A call of a unit that is under way."""

    __slots__ = ("begun", "containers", "entry", "guests", "unit", "visit")

    def __init__(self, unit: Unit, entry: int) -> None:
        self.unit = unit
        self.visit: Visit | None = None
        #: Number of the first autograd node that this call may have made, perhaps the engine's.
        self.entry = entry
        #: Number of the first that the module itself makes, if it makes one.
        self.begun = entry
        self.containers: list[Any] = []  #: inputs that the call may have put tensors into
        self.guests: list[Unit] = []
