"""A nested state of all ranks as one checkpoint: planned, written by every rank, committed by the first.

A failure on any rank removes the unfinished files and is raised on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from shardwright.checkpoint.load.checkpoints import check_whole, unfinished_checkpoint
from shardwright.checkpoint.load.reading import check_lengths, check_ranges
from shardwright.checkpoint.save.plan import SavePlan
from shardwright.checkpoint.save.writing import (
    BoxToWrite,
    Contents,
    WrittenFile,
    write_boxes,
    write_descriptions,
)
from shardwright.checkpoint.storage.locations import Location, store_of
from shardwright.checkpoint.storage.publishing import publish
from shardwright.checkpoint.storage.save_names import file_of_rank, files_of_save
from shardwright.checkpoint.storage.stores import Files, UnfinishedSave, unless_removed
from shardwright.checkpoint.storage.threads import Progress, ignore
from shardwright.common.errors import Damaged
from shardwright.engine import RankGroup, heartbeat


@heartbeat.during(heartbeat.SAVE)
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
) -> None:
    """Write a checkpoint of a nested state. Every rank must call it.

    Args:
        path: the folder, the URL or the store.
        state: dicts and lists of tensors and plain values, of this rank.
        ranks: those that have the state.
        overwrite: replace a checkpoint at the same place.
        verified: let each rank read its file back and compare it with the digests. The checkpoint appears only after
            that, and what it replaces stays until then.
        notes: texts to store in ``Index.about``, beside the versions of libraries.
        shared: the first keys below which all ranks have equal tensors, see :meth:`SavePlan.of`.
        progress: gets the number of bytes as they are written.

    Raises:
        ValueError: a tensor or value cannot be stored, or the ranks' boxes do not make up a tensor.
        FileExistsError: something is at ``path``, and ``overwrite`` is false or it is no checkpoint.
        OSError: a file cannot be written, or holds other bytes when it is read back. The message names rank, file and
            reason. Anything there is unchanged.
    """
    plan = SavePlan.of(state, ranks, notes, shared)
    save = store_of(path).unfinished(plan.contents.attempt)
    with publish(
        save, plan.contents.nbytes, overwrite, names=files_of_save(ranks.size), ranks=ranks, check=check_whole
    ):

        def write() -> WrittenFile:
            with unless_removed(save):
                return write_own_file(save, ranks.rank, plan.own, verified, progress)

        writes = ranks.gather(ranks.run_own(write))
        ranks.run_on_first(lambda: describe(save, plan.contents, writes or [], verified=verified))


def write_own_file(
    save: UnfinishedSave,
    rank: int,
    boxes: Iterable[BoxToWrite],
    verified: bool,
    progress: Progress = ignore,
) -> WrittenFile:
    """Write the file of a rank. With ``verified`` it is read back.

    Raises:
        OSError: the file cannot be written, or holds other bytes when it is read back.
    """
    written = write_boxes(save, file_of_rank(rank), boxes, progress)
    if verified and written.chunks:
        read_back(save, written, progress)
    return written


def describe(
    save: UnfinishedSave,
    contents: Contents,
    writes: list[WrittenFile],
    *,
    verified: bool = False,
    for_torch: bool = False,
) -> None:
    """Describe what all ranks have written, and check that it is whole. With ``verified`` descriptions are read back.

    A checkpoint that is ``for_torch`` gets no index, and cannot be ``verified``.

    Raises:
        OSError: a file cannot be written, or holds other bytes or fewer when it is read back.
        RuntimeError: the chunks are not all of the tensors.
    """
    with unless_removed(save):
        for each in writes:
            if not each.chunks:
                save.remove(each.file)
        index = write_descriptions(
            save, contents, [each for each in writes if each.chunks], for_torch=for_torch
        )
        with _other_bytes(save):
            check_lengths(save, {name: file.nbytes for name, file in index.files.items()})
            if verified:
                unfinished_checkpoint(save).verify_descriptions()


def read_back(save: UnfinishedSave, written: WrittenFile, progress: Progress = ignore) -> None:
    """Compare a rank's file with the digests that were taken when it was written.

    Raises:
        OSError: it holds other bytes.
    """
    save.drop_from_cache(written.file)
    with _other_bytes(save):
        check_ranges(save, written.file, [chunk.range for _, chunk in written.chunks], progress)


@contextlib.contextmanager
def _other_bytes(files: Files) -> Iterator[None]:
    try:
        yield
    except Damaged as problem:
        raise OSError(f"{files}: read back after it was written, {problem}") from problem
