"""The plan of a save: the boxes that each rank writes, and the contents of the checkpoint.

Every rank sends the list of its boxes to the first one. The first rank checks that they make up every tensor, and gives
each box to one of the ranks that have it.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch

from shardwright.checkpoint.format.boxes import Box, check_coverage
from shardwright.checkpoint.format.index import StoredValue, TensorForm
from shardwright.checkpoint.format.nested import NestedState, StateTensor
from shardwright.checkpoint.format.values import decoded, encoded
from shardwright.checkpoint.save.writing import BoxToWrite, Contents, versions
from shardwright.checkpoint.storage.stores import new_attempt
from shardwright.common.errors import Damaged
from shardwright.engine import RankGroup

_SMALL = 1 << 20  #: bytes of a whole tensor that need not be spread over ranks
BoxKey = tuple[str, tuple[int, ...], tuple[int, ...]]  #: name of the tensor, offsets and sizes


@dataclass(frozen=True)
class SavePlan:
    """The boxes that this rank writes, and the contents of the checkpoint."""

    own: list[BoxToWrite]
    contents: Contents  #: complete on the first rank; of this rank alone on others

    @classmethod
    def of(
        cls,
        state: Mapping[str, Any],
        ranks: RankGroup,
        notes: Mapping[str, str] | None = None,
        shared: Container[str] = (),
    ) -> SavePlan:
        """Agree on what every rank writes.

        Plain tensors may have other values on each rank, so the first rank that has one writes it. Below the keys
        ``shared`` large ones are equal on all ranks, so any rank may write them.

        Raises:
            ValueError: a tensor or value cannot be stored, or the ranks' boxes do not make up a tensor.
        """
        mine = ranks.run_own(lambda: _StateOfRank.of(state, shared))
        everyones = ranks.gather((mine.forms, list(mine.boxes), mine.of_first))
        agreed: list[tuple[dict[str, TensorForm], list[list[BoxKey]]]] = []
        ranks.run_on_first(lambda: agreed.append(_agreed(everyones or [])))
        forms, shares = agreed[0] if agreed else (mine.forms, None)
        own = [BoxToWrite(key[0], mine.boxes[key]) for key in ranks.scatter(shares)]
        attempt, texts = ranks.broadcast(new_attempt()), {**(notes or {}), **versions()}
        return cls(own, Contents(attempt, ranks.size, forms, mine.values, texts))


@dataclass(frozen=True)
class _StateOfRank:
    """A nested state as one rank has it.

    Attributes:
        forms: of all tensors, by name.
        boxes: this rank's.
        of_first: tensors that the first rank writes, of those that have them.
        values: as a reader of the index gets them.
    """

    forms: dict[str, TensorForm]
    boxes: dict[BoxKey, Box]
    of_first: set[str]
    values: dict[str, StoredValue]

    @classmethod
    def of(cls, state: Mapping[str, Any], shared: Container[str]) -> Self:
        """Raises ValueError for a tensor or value that cannot be stored."""
        entries = NestedState.of(state)
        tensors = entries.tensors.values()
        return cls(
            {each.name: TensorForm(each.path, each.dtype, each.shape) for each in tensors},
            {(each.name, box.offsets, box.sizes): box for each in tensors for box in each.boxes_to_save()},
            {each.name for each in tensors if _is_first_ranks(each, shared)},
            {name: _as_read(name, value) for name, value in entries.values.items()},
        )


def _as_read(name: str, stored: StoredValue) -> StoredValue:
    """Return a value as a reader of the index gets it.

    So torch's reader gets the same, in the same bytes, whatever objects are one object here.
    """
    return StoredValue(stored.path, decoded(json.loads(json.dumps(encoded(stored.value, name)))))


def _agreed(
    everyones: Sequence[tuple[dict[str, TensorForm], list[BoxKey], set[str]]],
) -> tuple[dict[str, TensorForm], list[list[BoxKey]]]:
    """Return the forms of all tensors, and the boxes that each rank writes, from forms, boxes and ``of_first`` of each
    rank.

    Raises:
        ValueError: the ranks' forms differ, or their boxes do not make up a tensor.
    """
    forms = _agreed_forms([forms for forms, _, _ in everyones])
    return forms, _shares(forms, [boxes for _, boxes, _ in everyones], everyones[0][2])


def _agreed_forms(everyones: list[dict[str, TensorForm]]) -> dict[str, TensorForm]:
    whole: dict[str, TensorForm] = {}
    for rank, forms in enumerate(everyones):
        for name, form in forms.items():
            if whole.setdefault(name, form) != form:
                raise ValueError(
                    f"{name} has dtype {form.dtype} and shape {form.shape} on rank {rank}, and "
                    f"{whole[name].dtype} and {whole[name].shape} on a rank before it"
                )
    return whole


def _is_first_ranks(each: StateTensor, shared: Container[str]) -> bool:
    """Return whether the first rank that has a tensor writes it, since others may have other values: buffers, say."""
    if type(each.tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False  # it says which part of it each rank has
    return each.path[0] not in shared or each.tensor.nbytes <= _SMALL


def _shares(
    forms: Mapping[str, TensorForm], everyones: list[list[BoxKey]], of_first: Container[str]
) -> list[list[BoxKey]]:
    """Return the boxes that each rank writes: each box once, about the same number of bytes by each rank.

    The first rank that has a box of a tensor in ``of_first`` writes it.
    """
    holders: dict[BoxKey, list[int]] = {}
    for rank, boxes in enumerate(everyones):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    by_tensor: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {name: [] for name in forms}
    for name, offsets, sizes in holders:
        by_tensor[name].append((offsets, sizes))
    for name, covered in by_tensor.items():
        try:
            check_coverage(name, forms[name].shape, covered)
        except Damaged as problem:
            raise ValueError(
                f"{problem}: the ranks do not have all of the tensor, or have it cut differently"
            ) from None
    shares: list[list[BoxKey]] = [[] for _ in everyones]
    loads = [0] * len(everyones)
    # Boxes that only one rank has come first; then the largest.
    for box in sorted(holders, key=lambda each: (len(holders[each]) > 1, -_nbytes(forms, each), each)):
        some = holders[box][:1] if box[0] in of_first else holders[box]
        rank = min(some, key=lambda each: (loads[each], each))
        loads[rank] += _nbytes(forms, box)
        shares[rank].append(box)
    return [sorted(share) for share in shares]


def _nbytes(forms: Mapping[str, TensorForm], box: BoxKey) -> int:
    return prod(box[2]) * forms[box[0]].dtype.itemsize
