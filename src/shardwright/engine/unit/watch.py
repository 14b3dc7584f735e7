"""What users do to a unit's modules: parameters and modules that they put there, take away or replace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from shardwright.engine.assembly.find import own_modules, parameters_of
from shardwright.engine.tensors.parameter import Slot, unit_of
from shardwright.engine.unit.hooks import StashedTensors


class Watch:
    """A unit's modules.

    Attributes:
        references: to them.
        unsharded: sharded parameters in whose place ``unsharded`` shows full tensors, on this rank or on another; its
            options.
        paused: while stand-ins are initialised in the place of the parameters.
        borrowed: parameters of other units that these modules hold, too, and where.
        lenders: these units.
        stash: tensors that the modules keep in attributes.
    """

    __slots__ = (
        "_child_count",
        "_child_ids",
        "_children",
        "_empty",
        "_ignored",
        "_ignored_modules",
        "_parents",
        "_registries",
        "_slot_count",
        "borrowed",
        "lenders",
        "paused",
        "references",
        "stash",
        "unsharded",
    )

    def __init__(
        self,
        modules: Sequence[nn.Module],
        ignored: Iterable[nn.Parameter],
        ignored_modules: Iterable[nn.Module],
    ) -> None:
        self.references = [weakref.ref(m) for m in modules]
        self._ignored = [weakref.ref(p) for p in ignored]
        self._ignored_modules = [weakref.ref(m) for m in ignored_modules]
        self.unsharded: dict[nn.Parameter, Any] = {}
        self.paused = False
        self.borrowed: list[tuple[nn.Parameter, Slot]] = []
        self.lenders: list[Any] = []
        self.look()

    def modules(self) -> list[nn.Module]:
        """Those that still live."""
        return [m for ref in self.references if (m := ref()) is not None]

    def ignored(self) -> list[nn.Parameter]:
        """Parameters that are not the unit's, those that ignored modules hold now among them."""
        parameters = [p for ref in self._ignored if (p := ref()) is not None]
        return [*parameters, *parameters_of(self.ignored_modules())]

    def ignored_modules(self) -> list[nn.Module]:
        return [m for ref in self._ignored_modules if (m := ref()) is not None]

    def look(self) -> None:
        """Remember which modules there are and how many parameters they have."""
        modules = [m for top in self.modules() for _, m in own_modules(top)]
        self._registries = [m._parameters for m in modules]
        self._children = [m._modules for m in modules]
        self._slot_count = sum(map(len, self._registries))
        self._child_count = sum(map(len, self._children))
        self._parents = [children for children in self._children if children]
        self._child_ids = self._ids_of_children()
        self._empty = [(r, name) for r in self._registries for name, p in r.items() if p is None]
        self.stash = StashedTensors(modules)

    def look_again_later(self) -> None:
        """Making the unit's memory has failed half-way: the next look finds a change."""
        self._child_count = -1  # as no number of modules is

    def _ids_of_children(self) -> list[int]:
        return [id(child) for children in self._parents for child in children.values()]

    def changed(self, shows: Callable[[Any], bool]) -> bool:
        """Whether there are other parameters or other modules, or one that is borrowed was replaced.

        ``shows`` says of another unit whether it shows full parameters now.
        """
        if (
            sum(map(len, self._registries)) != self._slot_count
            or sum(map(len, self._children)) != self._child_count
            or self._ids_of_children() != self._child_ids
        ):
            return True
        for registry, name in self._empty:
            if registry.get(name) is not None:
                return True
        for sharded, slot in self.borrowed:
            lender = unit_of(sharded)
            if lender is None or not (shows(lender) or slot.holds(sharded)):
                return True
        return False
