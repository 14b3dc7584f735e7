"""Detects changes of weights: with version counters, and an epoch that increases with each edit of the shards."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

from shardwright._torch import increment_version, quick_attributes
from shardwright.engine.tensors.parameter import ManagedParameter

NEVER = -1  #: the epoch of memory without weights
_version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def _versions_of(tensors: list[torch.Tensor]) -> list[int]:
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
        pairs = range(0, len(versions), 2)
        if behind := [
            i + 1 for i in pairs if versions[i] != earlier[i] and versions[i + 1] == earlier[i + 1]
        ]:
            # So that graphs over the shard, or over full parameters that are the shard, notice the edit.
            increment_version([self._watched[i] for i in behind])
            versions = _versions_of(self._watched)
        self._versions = versions
        self.epoch += 1
        changed = list(
            dict.fromkeys(
                i // 2 for i, (new, old) in enumerate(zip(versions, earlier, strict=True)) if new != old
            )
        )
        for i in changed:
            self._edited[i] = self.epoch
        return changed

    def edited_after(self, epoch: int) -> set[int]:
        """The indices of parameters whose shards were edited after a gather in this epoch."""
        return {i for i, edited in enumerate(self._edited) if edited > epoch} if epoch != NEVER else set()

    def write(self) -> None:
        """Count the engine's own write to the shards, so that later changes are the user's edits."""
        self._versions = _versions_of(self._watched)
        self.epoch += 1


class FullCounters:
    """Edits of full parameters, in one precision."""

    __slots__ = ("_versions", "tensors")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._versions = self._read()

    def forget(self) -> None:
        """Ignore all edits until now."""
        self._versions = self._read()

    def _read(self) -> list[int]:
        return _versions_of(self.tensors)

    def advance(self, tensors: Sequence[torch.Tensor]) -> None:
        """Increase these tensors' counters without an edit. Edits that no check has found yet still count."""
        before = self._read()
        increment_version(tensors)
        seen = zip(self._versions, before, self._read(), strict=True)
        self._versions = [version + after - earlier for version, earlier, after in seen]

    def moved(self) -> bool:
        """Whether any was edited since the last check."""
        return self._read() != self._versions

    def look(self) -> set[int]:
        """The ids of the tensors that were edited since the last check."""
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
