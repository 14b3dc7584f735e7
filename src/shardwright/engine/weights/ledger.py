"""Detects changes of weights: with version counters, and an epoch that increases with each edit of the shards.

The version counters also detect reads of weights that are not there. Autograd keeps the counter's number with each
tensor that it saves and compares it before backward reads the tensor. While the full weights of a unit are not
gathered, their counters have a number that no saved tensor has, so such a read raises an error. It costs nothing per
operation.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from itertools import compress

import torch

from shardwright.engine.compat.autograd import increment_version, set_versions
from shardwright.engine.compat.modes import quick_attributes
from shardwright.engine.memory import Owner
from shardwright.engine.tensors.parameter import ManagedParameter

NEVER = -1  #: the epoch of memory without weights
_version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    with quick_attributes():
        return list(map(_version_of, tensors))


class Ledger:
    """Edits of a unit's shards.

    Attributes:
        epoch: number of noticed edits. Gathered weights have the epoch of their gather, and are valid while it is
        equal.
    """

    __slots__ = ("_edited", "_versions", "_watched", "epoch")

    def __init__(self, parameters: Sequence[ManagedParameter]) -> None:
        #: An edit increases a parameter's own counter, or the counter of its local tensor.
        self._watched: list[torch.Tensor] = [t for p in parameters for t in (p.sharded, p.local)]
        self._versions = _versions_of(self._watched)
        self._edited = [0] * len(parameters)  #: by parameter, the epoch of its last edit
        self.epoch = 0

    def look(self) -> list[int]:
        """The indices of parameters that were edited since the last check."""
        versions, earlier = _versions_of(self._watched), self._versions
        if versions == earlier:
            return []
        moved = list(map(operator.ne, versions, earlier))
        own, local = moved[::2], moved[1::2]
        if any(map(operator.gt, own, local)):
            # So that graphs over the shard, or over full parameters that are the shard, notice the edit.
            increment_version(list(compress(self._watched[1::2], map(operator.gt, own, local))))
            versions = _versions_of(self._watched)
        changed = list(compress(range(len(own)), map(operator.or_, own, local)))
        self.epoch += 1
        for i in changed:
            self._edited[i] = self.epoch
        self._versions = versions  # last: if a signal's handler raises before, the edit is found again
        return changed

    def edited_after(self, epoch: int) -> set[int]:
        """The indices of parameters whose shards were edited after a gather in this epoch."""
        return {i for i, edited in enumerate(self._edited) if edited > epoch} if epoch != NEVER else set()

    def write(self) -> None:
        """Count the engine's own write to the shards, so that later changes are the user's edits."""
        self._versions = _versions_of(self._watched)
        self.epoch += 1


#: Counters of weights that are not gathered have numbers from here on. Each unit has one, so that an error of autograd,
#: which mentions the number, can name the unit. Counters have 32 bits, and real edits never count so far.
_HIDDEN = 1 << 31
_numbers = itertools.count(_HIDDEN)
_hidden: weakref.WeakValueDictionary[int, FullCounters] = weakref.WeakValueDictionary()


def unit_of_version(version: int) -> str | None:
    """Return the name of the unit whose weights have this version number while they are not gathered."""
    counters = _hidden.get(version)
    return None if counters is None else counters.owner.name


class FullCounters:
    """The version counters of a unit's full parameters, in one precision. They count edits, and they make autograd
    refuse the parameters while they are hidden.

    Attributes:
        tensors: the tensors that have the counters.
        owner: the owner of the parameters' memory.
    """

    __slots__ = ("__weakref__", "_advancing", "_all", "_number", "_real", "_versions", "owner", "tensors")

    def __init__(self, tensors: list[torch.Tensor], owner: Owner) -> None:
        self.tensors = tensors
        self.owner = owner
        self._all = tuple(tensors)
        self._real: list[int] | None = None  #: the counters' real numbers while they are hidden
        #: The numbers before :meth:`advance` increases them. It stays if a signal's handler raises inside.
        self._advancing: list[int] | None = None
        self._number = (next(_numbers),) * len(tensors)
        if tensors:
            _hidden[self._number[0]] = self
        self._versions = self._read()

    def forget(self) -> None:
        """Ignore all edits until now."""
        self._versions, self._advancing = self._read(), None

    def _read(self) -> list[int]:
        return _versions_of(self._all) if self._real is None else self._real

    def hide(self) -> None:
        """Let autograd refuse saved tensors over the parameters, because their weights are not gathered."""
        if self._real is None and self._all:
            self._real = _versions_of(self._all)
            set_versions(self._all, self._number)

    def show(self) -> None:
        """Give the counters their real numbers back, because the weights are gathered."""
        real = self._real
        if real is not None:
            set_versions(self._all, tuple(real))
            self._real = None

    def advance(self, tensors: Sequence[torch.Tensor]) -> None:
        """Increase these tensors' counters without an edit. Edits that no check has found yet still count."""
        self._end_advance()
        if self._real is None:
            self._advancing = self._read()
            increment_version(tensors)
            self._end_advance()
            return
        ids = set(map(id, tensors))
        more = list(map(ids.__contains__, map(id, self.tensors)))
        real = list(map(operator.add, self._real, more))
        versions = list(map(operator.add, self._versions, more))
        self._real, self._versions = real, versions  # nothing can raise between the two

    def _end_advance(self) -> None:
        """Count the numbers by which :meth:`advance` has increased the counters as no edits."""
        before = self._advancing
        if before is not None:
            seen = zip(self._versions, before, self._read(), strict=True)
            versions = [version + after - earlier for version, earlier, after in seen]
            self._versions, self._advancing = versions, None  # nothing can raise between the two

    def moved(self) -> bool:
        """Whether any was edited since the last check."""
        if self._advancing is not None:
            self._end_advance()
        return (_versions_of(self._all) if self._real is None else self._real) != self._versions

    def look(self) -> set[int]:
        """The ids of the tensors that were edited since the last check."""
        self._end_advance()
        versions, earlier = self._read(), self._versions
        if versions == earlier:
            return set()
        self._versions = versions
        return {id(t) for t, new, old in zip(self.tensors, versions, earlier, strict=True) if new != old}

    def intact(self, among: Sequence[torch.Tensor]) -> bool:
        """Whether these were not edited since the last check."""
        ids = set(map(id, among))
        earlier = zip(self.tensors, self._versions, strict=True)
        return all(t._version == version for t, version in earlier if id(t) in ids)
