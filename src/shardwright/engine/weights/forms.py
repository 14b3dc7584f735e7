"""Puts one form of a unit's parameters into its modules: sharded ones, full ones, or copies of the full ones."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.tensors.extension import any_attached
from shardwright.engine.tensors.parameter import ManagedParameter
from shardwright.engine.weights.lasting import Lasting


class Forms:
    """The forms of one build of a unit's memory.

    Attributes:
        full_shown: whether modules hold the full parameters.
        ever_shown: whether any call or backward has ever used the unit.
        lends_over: whether tensors that are no parameters replace some parameters.
        lasting: copies that modules show instead of the full parameters.
        shardeds: the sharded parameters.
    """

    __slots__ = (
        "_fulls",
        "_local_attributes",
        "_locals",
        "_names",
        "_other_slots",
        "_parameters",
        "_plain_slots",
        "_registries",
        "_shardeds",
        "ever_shown",
        "full_shown",
        "lasting",
        "lends_over",
        "shardeds",
    )

    def __init__(self, parameters: list[ManagedParameter], ever_shown: bool) -> None:
        self._parameters = parameters
        self.full_shown = False
        self.ever_shown = ever_shown
        self.lends_over = False
        self.lasting: Lasting | None = None
        self.index()

    def index(self) -> None:
        """Record the places of parameters in modules, for the loops of every forward and backward."""
        parameters = self._parameters
        self._plain_slots = [
            (slot.registry, slot.name, p.sharded, p.full)
            for p in parameters
            for slot in p.slots
            if slot.registry is not None
        ]
        # The same in columns, for loops in C.
        columns = [list(column) for column in zip(*self._plain_slots, strict=True)] or [[], [], [], []]
        self._registries, self._names, self._shardeds, self._fulls = columns
        self._other_slots = [p for p in parameters if any(slot.registry is None for slot in p.slots)]
        self.shardeds = [p.sharded for p in parameters]
        self._locals = [p.local for p in parameters]
        #: Attributes of the local tensors, where users may attach ``fsdp_pre_all_gather`` after ``fully_shard``.
        self._local_attributes = [p.local.__dict__ for p in parameters if p.extension is None]

    def untouched(self) -> bool:
        """Whether the modules hold the sharded parameters, over their shards. A quick check."""
        return not (
            self._other_slots
            or not self._hold(self._shardeds)
            or any(map(operator.is_not, map(local_of, self.shardeds), self._locals))  # type: ignore[arg-type]
            or any_attached(self._local_attributes)
        )

    def _hold(self, forms: list[Any]) -> bool:
        """Whether all modules that keep their parameters in a plain registry hold these forms."""
        return all(map(operator.is_, map(dict.get, self._registries, self._names), forms))

    def _put(self, forms: list[Any]) -> None:
        """Let all of these modules hold these forms."""
        deque(map(operator.setitem, self._registries, self._names, forms), maxlen=0)

    def show_full(self) -> None:
        """Show the full parameters. If a module holds another object than the sharded parameter, the user's object
        stays."""
        if self.full_shown:
            return
        self.full_shown = self.ever_shown = True  # set first, so that an interrupted loop is undone
        if self._hold(self._shardeds):
            self._put(self._fulls)
        else:
            for registry, name, sharded, full in self._plain_slots:
                if registry.get(name) is sharded:
                    registry[name] = full
        for p in self._other_slots:
            p.show(p.full)

    def show_sharded(self) -> None:
        """Show the sharded parameters. Objects of the user stay, as in :meth:`show_full`."""
        if self._hold(self._fulls):
            self._put(self._shardeds)
        else:
            for registry, name, sharded, full in self._plain_slots:
                if registry.get(name) is full:
                    registry[name] = sharded
        for p in self._other_slots:
            p.show(p.sharded)
        self.full_shown = False

    def hide_lasting(self) -> None:
        """Show the full parameters again, in place of the copies."""
        assert self.lasting is not None
        self.lasting.hide()
        self.lasting = None
