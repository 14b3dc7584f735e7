"""Saves a nested state of all ranks as one checkpoint: planned, written by every rank, committed by the first.

Every rank sends the list of its boxes to the first one. The first rank checks that they make up every tensor, gives
each box to one of the ranks that have it, and at the end writes the index and commits. A failure on any rank removes
the unfinished files and is raised on every rank.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwright import board as boards
from shardwright.checkpoint.format.index import Index, StoredValue, check_coverage
from shardwright.checkpoint.format.names import file_of_rank, files_of_save
from shardwright.checkpoint.format.nested import Box, NamedTensor, NestedState, Progress, ignore
from shardwright.checkpoint.format.values import decoded, encoded
from shardwright.checkpoint.load.checkpoints import OwnCheckpoint, read_description
from shardwright.checkpoint.load.loading import open_together
from shardwright.checkpoint.load.reading import check_parts
from shardwright.checkpoint.save.writing import (
    Contents,
    PartToWrite,
    Written,
    about,
    drop_from_cache,
    write_descriptions,
    write_parts,
)
from shardwright.checkpoint.storage.places import Location, store_of
from shardwright.checkpoint.storage.stores import Store, new_attempt
from shardwright.collective import RankGroup
from shardwright.errors import Damaged

TensorForm = tuple[Any, torch.dtype, tuple[int, ...]]  #: path, dtype and shape of a tensor
_SMALL = 1 << 20  #: bytes of a whole tensor that need not be spread over ranks
BoxName = tuple[str, tuple[int, ...], tuple[int, ...]]  #: name of the tensor, offsets and sizes


@boards.during(boards.SAVE)
def write_state(
    path: Location,
    state: Mapping[str, Any],
    ranks: RankGroup,
    *,
    overwrite: bool = False,
    verified: bool = False,
    notes: Mapping[str, str] | None = None,
    shared: Container[str] = (),
    progress: Progress = ignore,
) -> Index | None:
    """Write a checkpoint of a nested state. Every rank must call it. Returns the index on the first rank.

    With ``verified`` all that was written is read back and compared with its digests, each rank a share, before the
    checkpoint appears, and before anything that it replaces is touched.
    ``notes`` are texts for :attr:`Index.about`, beside the versions of libraries. ``shared``: see :meth:`SavePlan.of`.

    Raises:
        ValueError: a tensor or value cannot be stored, or the ranks' boxes do not make up a tensor.
        FileExistsError: something is at ``path``, and ``overwrite`` is false or it is no checkpoint.
        OSError: a file cannot be written, or holds other bytes when it is read back. The message names rank, file and
            reason. Anything there is unchanged.
    """
    plan = SavePlan.of(state, ranks, notes, shared)
    with open_save(path, plan, ranks, overwrite) as folder:
        own: list[Written] = []

        def write() -> None:
            with unless_removed(path, folder):
                own.append(write_parts(folder, file_of_rank(ranks.rank), plan.own, progress))

        ranks.run_on_all(write)
        writes, index = ranks.gather(own[0]), None

        def describe() -> None:
            nonlocal index
            with unless_removed(path, folder):
                index = describe_parts(folder, plan.contents, writes or [])

        ranks.run_on_first(describe)
        if verified:
            _read_back_together(folder, ranks, progress)
        ranks.run_on_first(lambda: _commit(path, folder, plan.contents.attempt, overwrite))
        return index


@dataclass(frozen=True)
class SavePlan:
    """The parts that this rank saves, and the contents of the checkpoint."""

    own: list[PartToWrite]
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
        parts: dict[BoxName, Box] = {}
        forms: dict[str, TensorForm] = {}
        values: dict[str, StoredValue] = {}
        of_first: set[str] = set()

        def take() -> None:
            mine = NestedState.of(state)
            for each in mine.tensors.values():
                forms[each.name] = (each.path, each.dtype, each.shape)
                if _is_first_ranks(each, shared):
                    of_first.add(each.name)
                for box in each.boxes_to_save():
                    parts[each.name, box.offsets, box.sizes] = box
            for name, value in mine.values.items():
                # As a reader of the index gets it. So torch's reader gets the same, in the same bytes, whatever objects
                # are one object here.
                text = json.dumps(encoded(value.value, name))
                values[name] = StoredValue(value.path, decoded(json.loads(text)))

        ranks.run_on_all(take)
        everyones = ranks.gather((forms, list(parts), of_first))
        whole: dict[str, TensorForm] = {}
        shares: list[list[BoxName]] | None = None

        def divide() -> None:
            nonlocal shares, whole
            assert everyones is not None
            whole = _agreed_forms([forms for forms, _, _ in everyones])
            shares = _shares(whole, [boxes for _, boxes, _ in everyones], everyones[0][2])

        ranks.run_on_first(divide)
        mine = ranks.scatter(shares)
        attempt = ranks.broadcast(new_attempt())
        own = [PartToWrite(*name, parts[name].local) for name in mine]
        texts = {**(notes or {}), **about()}
        return cls(own, Contents(attempt, ranks.size, whole or forms, values, texts))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(prod(shape) * dtype.itemsize for _, dtype, shape in self.contents.tensors.values())


def _agreed_forms(everyones: list[dict[str, TensorForm]]) -> dict[str, TensorForm]:
    whole: dict[str, TensorForm] = {}
    for rank, forms in enumerate(everyones):
        for name, form in forms.items():
            if whole.setdefault(name, form) != form:
                raise ValueError(
                    f"{name} has dtype {form[1]} and shape {form[2]} on rank {rank}, and "
                    f"{whole[name][1]} and {whole[name][2]} on a rank before it"
                )
    return whole


def _is_first_ranks(each: NamedTensor, shared: Container[str]) -> bool:
    """Whether the first rank that has a tensor writes it, since others may have other values: buffers, say."""
    if type(each.tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False  # it says which part of it each rank has
    return each.path[0] not in shared or each.tensor.nbytes <= _SMALL


def _shares(
    forms: Mapping[str, TensorForm], everyones: list[list[BoxName]], of_first: Container[str]
) -> list[list[BoxName]]:
    """The boxes that each rank writes: each box once, about the same number of bytes by each rank.

    The first rank that has a box of a tensor in ``of_first`` writes it.
    """
    holders: dict[BoxName, list[int]] = {}
    for rank, boxes in enumerate(everyones):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    by_tensor: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {name: [] for name in forms}
    for name, offsets, sizes in holders:
        by_tensor[name].append((offsets, sizes))
    for name, covered in by_tensor.items():
        try:
            check_coverage(name, forms[name][2], covered)
        except Damaged as problem:
            raise ValueError(
                f"{problem}: the ranks do not have all of the tensor, or have it cut differently"
            ) from None
    shares: list[list[BoxName]] = [[] for _ in everyones]
    loads = [0] * len(everyones)
    # Boxes that only one rank has come first; then the largest.
    for box in sorted(holders, key=lambda each: (len(holders[each]) > 1, -_nbytes(forms, each), each)):
        some = holders[box][:1] if box[0] in of_first else holders[box]
        rank = min(some, key=lambda each: (loads[each], each))
        loads[rank] += _nbytes(forms, box)
        shares[rank].append(box)
    return [sorted(share) for share in shares]


def _nbytes(forms: Mapping[str, TensorForm], box: BoxName) -> int:
    return prod(box[2]) * forms[box[0]][1].itemsize


@contextlib.contextmanager
def open_save(path: Location, plan: SavePlan, ranks: RankGroup, overwrite: bool) -> Iterator[Store]:
    """The unfinished store into which the ranks write. Every rank sees it. It is removed if anything fails.

    Raises:
        FileExistsError, OSError: as :func:`write_state`.
    """
    attempt, place = plan.contents.attempt, store_of(path)
    unfinished = place.unfinished(attempt)
    try:
        ranks.run_on_first(lambda: place.begin(attempt, plan.nbytes, overwrite))
        first = ranks.broadcast(str(place))

        def see() -> None:
            try:
                unfinished.check_seen()
            except OSError:
                if str(place) != first:
                    raise ValueError(
                        f"this rank saves to {place}, and rank 0 to {first}. Pass the same path on every rank"
                    ) from None
                raise

        ranks.run_on_all(see)
        yield unfinished
    except BaseException:
        if ranks.is_first:
            unfinished.abandon(files_of_save(ranks.size))
        raise


@contextlib.contextmanager
def unless_removed(path: Location, unfinished: Store) -> Iterator[None]:
    """Raise an OSError that explains it if the block fails because another save has removed what this one writes."""
    try:
        yield
    except (OSError, Damaged) as error:
        if not unfinished.is_removed():
            raise
        raise OSError(
            f"{path}: what this save had written was removed, by another program that saves to the same path or "
            "deletes files there. Let one program at a time save to a path"
        ) from error


def describe_parts(folder: Store, contents: Contents, writes: list[Written]) -> Index:
    """Describe what each rank has written into ``folder``, and check that it is whole.

    Raises:
        OSError: a file cannot be written, or has another size than what was written.
        RuntimeError: the parts are not all parts of the tensors.
    """
    for each in writes:
        if not each.parts:
            folder.remove(each.file)
    index = write_descriptions(folder, contents, [each for each in writes if each.parts])
    for name, file in index.files.items():
        try:
            nbytes = folder.size(name)
        except Damaged as problem:
            raise OSError(f"{folder}/{name}: {problem}") from None
        if nbytes != file.nbytes:
            raise OSError(f"{folder}/{name}: {nbytes:,} bytes are there, {file.nbytes:,} were written")
    return index


def commit_parts(
    path: Location,
    folder: Path | Store,
    contents: Contents,
    writes: list[Written],
    *,
    overwrite: bool,
    verified: bool = False,
) -> Index:
    """Describe what each rank has written into ``folder``, check that it is whole, and commit it.

    With ``verified`` the descriptions are read back, too. The ranks have read back their own files.

    Raises:
        OSError: as :func:`describe_parts`, or the folder cannot be renamed, or a file holds other bytes when it is
            read back. Anything at ``path`` is unchanged.
        RuntimeError: as :func:`describe_parts`.
    """
    unfinished = store_of(folder)
    with unless_removed(path, unfinished):
        index = describe_parts(unfinished, contents, writes)
        if verified:
            with _other_bytes(folder):
                opened = read_description(unfinished)
                assert isinstance(opened, OwnCheckpoint)
                opened.verify_descriptions()
    _commit(path, unfinished, contents.attempt, overwrite)
    return index


def read_back(folder: Path | Store, written: Written) -> None:
    """Compare a rank's file with the digests that were taken when it was written.

    Raises:
        OSError: it holds other bytes.
    """
    drop_from_cache(folder, written.file)
    with _other_bytes(folder):
        if written.parts:
            check_parts(folder, written.file, [part for _, part in written.parts])


def _read_back_together(folder: Store, ranks: RankGroup, progress: Progress) -> None:
    """Raise OSError on every rank if a file does not hold what was written. Each rank reads a share."""
    ranks.run_on_all(lambda: drop_from_cache(folder, file_of_rank(ranks.rank)))
    with _other_bytes(folder):
        open_together(folder, ranks, lambda checkpoint: None, progress)


@contextlib.contextmanager
def _other_bytes(folder: Path | Store) -> Iterator[None]:
    try:
        yield
    except Damaged as problem:
        raise OSError(f"{folder}: read back after it was written, {problem}") from problem


def _commit(path: Location, folder: Store, attempt: str, overwrite: bool) -> None:
    place = store_of(path)
    place.check_free(overwrite)  # since the begin of the save something may have come there
    with unless_removed(path, folder):
        place.commit(folder, overwrite)
    place.remove_leftovers(attempt)
