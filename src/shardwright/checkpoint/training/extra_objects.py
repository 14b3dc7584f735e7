"""The objects, tensors and values that a user passes as ``extra``: their states for a save, and the section of a load.

Tensors are read in place, and objects get their stored state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from shardwright.checkpoint.format.nested import NestedState
from shardwright.checkpoint.load.checkpoints import Checkpoint
from shardwright.checkpoint.training.arguments import reason_of
from shardwright.checkpoint.training.section_to_load import SectionToLoad, of_stored_form, targets_below
from shardwright.common.errors import Damaged
from shardwright.engine import RankGroup

EXTRA = "extra"


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def with_states(extra: Mapping[str, Any]) -> dict[str, Any]:
    """``extra`` with the states of its objects.

    Raises:
        ValueError: an object cannot give its state.
    """
    return {key: _state_of(key, value) if is_stateful(value) else value for key, value in extra.items()}


def _state_of(key: str, value: Any) -> Any:
    try:
        return value.state_dict()
    except Exception as error:
        raise ValueError(
            f"extra[{key!r}]: the state_dict of this {type(value).__name__} has failed ({reason_of(error)})"
        ) from error


@dataclass
class ExtraToLoad(SectionToLoad):
    """All of the stored ``extra``, and the objects and tensors of the run that are restored from it.

    An object whose sharded tensors are read in place is late: it gets its state when these have their values, after
    everything that can be refused. The other objects get theirs before any value of the run changes.

    Attributes:
        checkpoint, ranks: of the load.
        given: the objects and tensors, as the user passes them.
        in_place: names of the tensors that are read in place.
        changes: gives the objects that have got their stored states their earlier ones back.
    """

    key = EXTRA
    checkpoint: Checkpoint
    ranks: RankGroup
    given: Mapping[str, Any]
    in_place: frozenset[str]
    tensors: Mapping[str, Tensor]
    changes: ExitStack = field(default_factory=ExitStack, init=False)

    @classmethod
    def of(cls, checkpoint: Checkpoint, ranks: RankGroup, given: Mapping[str, Any]) -> Self:
        """Raises ValueError: an object cannot give its state, or there is no memory for a stored tensor."""
        own = _tensors_in_place(checkpoint, given)
        tensors = targets_below(checkpoint, EXTRA, own)
        return cls(checkpoint, ranks, given, frozenset(own), tensors)

    def check(self) -> None:
        for key, value in self.given.items():
            wanted = is_stateful(value) or NestedState.of({EXTRA: {key: value}}).tensors
            if wanted and not self.checkpoint.has(f"{EXTRA}.{key}"):
                keys = sorted({repr(name.partition(".")[0]) for name in self.checkpoint.below(EXTRA)})
                there = ", ".join(keys)[:200] or "none"
                raise ValueError(f"{self.checkpoint.place} has no extra {key!r}; it has {there}")

    def is_new(self, name: str) -> bool:
        return name not in self.in_place

    def accept(self, content: Mapping[str, Any]) -> None:
        self._restore_objects(content, late=False)

    def restore(self, content: Mapping[str, Any]) -> None:
        self.ranks.run_on_all(lambda: self._restore_objects(content, late=True))

    def undo(self) -> None:
        self.changes.close()

    def _restore_objects(self, content: Mapping[str, Any], *, late: bool) -> None:
        for key, value in self.given.items():
            is_late = any(name.startswith(f"{EXTRA}.{key}.") for name in self.in_place)
            if not is_stateful(value) or is_late != late:
                continue
            if key not in content:
                raise Damaged(f"extra {key!r} is stored in an unknown form")
            self.changes.callback(value.load_state_dict, copy.deepcopy(value.state_dict()))
            try:
                value.load_state_dict(content[key])
            except Exception as error:
                raise ValueError(
                    f"{self.checkpoint.place}: extra {key!r} cannot be restored by its {type(value).__name__} "
                    f"({reason_of(error)})"
                ) from error


def _tensors_in_place(checkpoint: Checkpoint, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of ``extra`` to read into, by name: given ones, and of objects the sharded ones that fit."""
    own: dict[str, Tensor] = {}
    for key, value in with_states(given).items():
        tensors = {name: each.tensor for name, each in NestedState.of({EXTRA: {key: value}}).tensors.items()}
        if is_stateful(given[key]):
            tensors = {
                name: each
                for name, each in of_stored_form(checkpoint, tensors).items()
                if hasattr(each, "full_tensor")
            }
        own |= tensors
    return own
