"""Notices changes that users make to a unit's modules: added, removed or replaced parameters and modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import is_not
from typing import Any

from torch import nn

from shardwright.engine.assembly.find import own_modules, parameters_of
from shardwright.engine.tensors.parameter import Slot, unit_of
from shardwright.engine.unit.marks import StashedTensors


class ModuleWatch:
    """A unit's modules.

    Attributes:
        references: weak references to them.
        unsharded: sharded parameters in whose place ``unsharded`` shows full tensors, on this rank or on another; its
            options.
        paused: while stand-ins are initialised in the place of the parameters.
        borrowed: parameters of other units that these modules also hold, and their slots.
        lenders: the other units.
        stash: tensors that the modules keep in attributes.
    """

    __slots__ = (
        "_child_ids",
        "_children",
        "_empty",
        "_empty_names",
        "_ignored",
        "_ignored_modules",
        "_registries",
        "_sizes",
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
        """The modules that still exist."""
        return [m for ref in self.references if (m := ref()) is not None]

    def ignored(self) -> list[nn.Parameter]:
        """Parameters that the unit ignores, including all present parameters of ignored modules."""
        parameters = [p for ref in self._ignored if (p := ref()) is not None]
        return [*parameters, *parameters_of(self.ignored_modules())]

    def ignored_modules(self) -> list[nn.Module]:
        return [m for ref in self._ignored_modules if (m := ref()) is not None]

    def look(self) -> None:
        """Record the present modules and their numbers of parameters."""
        modules = [m for top in self.modules() for _, m in own_modules(top)]
        self._registries = [m._parameters for m in modules]
        self._children = [m._modules for m in modules]
        self._sizes = self._sizes_of_registries()
        self._child_ids = self._ids_of_children()
        empty = [(r, name) for r in self._registries for name, p in r.items() if p is None]
        self._empty, self._empty_names = [r for r, _ in empty], [name for _, name in empty]
        self.stash = StashedTensors(modules)

    def look_again_later(self) -> None:
        """After a failure while the unit's memory was made: let the next check find a change."""
        self._sizes = []  # impossible, since there are modules

    def _sizes_of_registries(self) -> list[int]:
        """The numbers of parameters and of children of each module."""
        return [*map(len, self._registries), *map(len, self._children)]

    def _ids_of_children(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._children))))

    def changed(self, shows: Callable[[Any], bool]) -> bool:
        """Whether parameters or modules have changed, or a borrowed parameter was replaced.

        ``shows`` returns whether another unit shows full parameters now.
        """
        if (
            self._sizes_of_registries() != self._sizes
            or self._ids_of_children() != self._child_ids
            or any(map(is_not, map(dict.get, self._empty, self._empty_names), repeat(None)))
        ):
            return True
        for sharded, slot in self.borrowed:
            lender = unit_of(sharded)
            if lender is None or not (shows(lender) or slot.holds(sharded)):
                return True
        return False
