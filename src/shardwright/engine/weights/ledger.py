"""Detects changes of weights: with version counters, and an epoch that increases with each edit of the shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright._torch import increment_version, quick_attributes
from shardwright.engine.tensors.parameter import ManagedParameter

NEVER = -1  #: the epoch of memory without weights


class Ledger:
    """Edits of a unit's shards.

    Attributes:
        epoch: number of noticed edits. Gathered weights have the epoch of their gather, and are valid while it is
        equal.
    """

    __slots__ = ("_edited", "_versions", "_watched", "epoch")

    def __init__(self, parameters: Sequence[ManagedParameter]) -> None:
        #: An edit increases a parameter's own counter, or the counter of its local tensor.
        self._watched = [(p.sharded, p.local) for p in parameters]
        self._versions = [p._version + q._version for p, q in self._watched]
        self._edited = [0] * len(self._watched)  #: by parameter, the epoch of its last edit
        self.epoch = 0

    def look(self) -> list[int]:
        """The indices of parameters that were edited since the last check."""
        with quick_attributes():
            versions = [p._version + q._version for p, q in self._watched]
        earlier = self._versions
        if versions == earlier:
            return []
        self._versions = versions
        self.epoch += 1
        changed = [i for i, (new, old) in enumerate(zip(versions, earlier, strict=True)) if new != old]
        for i in changed:
            self._edited[i] = self.epoch
        return changed

    def edited_after(self, epoch: int) -> set[int]:
        """The indices of parameters whose shards were edited after a gather in this epoch."""
        return {i for i, edited in enumerate(self._edited) if edited > epoch} if epoch != NEVER else set()

    def write(self) -> None:
        """Count the engine's own write to the shards, so that later changes are the user's edits."""
        self._versions = [p._version + q._version for p, q in self._watched]
        self.epoch += 1


class FullCounters:
    """Edits of full parameters, in one precision."""

    __slots__ = ("_versions", "tensors")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._versions = [t._version for t in tensors]

    def forget(self) -> None:
        """Ignore all edits until now."""
        self._versions = [t._version for t in self.tensors]

    def advance(self, tensors: Sequence[torch.Tensor]) -> None:
        """Increase these tensors' counters without an edit. Edits that no check has found yet still count."""
        unseen = [t._version - version for t, version in zip(self.tensors, self._versions, strict=True)]
        increment_version(tensors)
        self._versions = [t._version - edits for t, edits in zip(self.tensors, unseen, strict=True)]

    def moved(self) -> bool:
        """Whether any was edited since the last check."""
        with quick_attributes():
            return [t._version for t in self.tensors] != self._versions

    def look(self) -> set[int]:
        """The ids of the tensors that were edited since the last check."""
        with quick_attributes():
            versions = [t._version for t in self.tensors]
        earlier = self._versions
        if versions == earlier:
            return set()
        self._versions = versions
        return {id(t) for t, new, old in zip(self.tensors, versions, earlier, strict=True) if new != old}

    def intact(self, among: Sequence[torch.Tensor]) -> bool:
        """Whether these were not edited since the last check."""
        ids = set(map(id, among))
        earlier = zip(self.tensors, self._versions, strict=True)
        return all(t._version == version for t, version in earlier if id(t) in ids)
