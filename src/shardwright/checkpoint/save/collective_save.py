"""A nested state of all ranks as one checkpoint: planned, written by every rank, committed by the first.

A failure on any rank removes the unfinished files and is raised on every rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterator, Mapping
from typing import Any

from shardwright import board as boards
from shardwright.checkpoint.format.progress import Progress, ignore
from shardwright.checkpoint.load.checkpoints import check_whole, unfinished_checkpoint
from shardwright.checkpoint.load.collective_load import open_together, verify_together
from shardwright.checkpoint.load.reading import check_ranges
from shardwright.checkpoint.save.plan import SavePlan
from shardwright.checkpoint.save.writing import Contents, WrittenFile, write_boxes, write_descriptions
from shardwright.checkpoint.storage.locations import Location, store_of
from shardwright.checkpoint.storage.publishing import publish
from shardwright.checkpoint.storage.save_names import file_of_rank, files_of_save
from shardwright.checkpoint.storage.stores import Files, UnfinishedSave, unless_removed
from shardwright.collective import RankGroup
from shardwright.errors import Damaged


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
) -> None:
    """Write a checkpoint of a nested state. Every rank must call it.

    With ``verified`` all that was written is read back and compared with its digests, each rank a share, before the
    checkpoint appears, and before anything that it replaces is touched.
    ``notes`` are texts for ``Index.about``, beside the versions of libraries. ``shared``: see :meth:`SavePlan.of`.

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
                return write_boxes(save, file_of_rank(ranks.rank), plan.own, progress)

        writes = ranks.gather(ranks.run_own(write))

        def describe() -> None:
            with unless_removed(save):
                _describe(save, plan.contents, writes or [])

        ranks.run_on_first(describe)
        if verified:
            _read_back_together(save, ranks, progress)


def _describe(save: UnfinishedSave, contents: Contents, writes: list[WrittenFile]) -> None:
    """Describe what each rank has written, and check that it is whole.

    Raises:
        OSError: a file cannot be written, or has another size than what was written.
        RuntimeError: the chunks are not all of the tensors.
    """
    for each in writes:
        if not each.chunks:
            save.remove(each.file)
    index = write_descriptions(save, contents, [each for each in writes if each.chunks])
    for name, file in index.files.items():
        try:
            nbytes = save.size(name)
        except Damaged as problem:
            raise OSError(f"{save}/{name}: {problem}") from None
        if nbytes != file.nbytes:
            raise OSError(f"{save}/{name}: {nbytes:,} bytes are there, {file.nbytes:,} were written")


def commit_written(
    save: UnfinishedSave, contents: Contents, writes: list[WrittenFile], overwrite: bool, verified: bool
) -> None:
    """Describe what each rank has written, check that it is whole, and commit it.

    With ``verified`` the descriptions are read back, too. The ranks have read back their own files.

    Raises:
        OSError: as :func:`write_state`.
        RuntimeError: the chunks are not all of the tensors.
    """
    with unless_removed(save):
        _describe(save, contents, writes)
        if verified:
            with _other_bytes(save):
                unfinished_checkpoint(save).verify_descriptions()
    save.commit(overwrite)


def read_back(save: UnfinishedSave, written: WrittenFile) -> None:
    """Compare a rank's file with the digests that were taken when it was written.

    Raises:
        OSError: it holds other bytes.
    """
    drop_from_cache(save, written.file)
    with _other_bytes(save):
        if written.chunks:
            check_ranges(save, written.file, [chunk.range for _, chunk in written.chunks])


def _read_back_together(save: UnfinishedSave, ranks: RankGroup, progress: Progress) -> None:
    """Raise OSError on every rank if a file does not hold what was written. Each rank reads a share."""
    ranks.run_on_all(lambda: drop_from_cache(save, file_of_rank(ranks.rank)))
    with _other_bytes(save):
        verify_together(open_together(lambda: unfinished_checkpoint(save), ranks), ranks, progress)


def drop_from_cache(files: Files, name: str) -> None:
    """Let the next read of a file come from the disk, as far as that is possible. Objects have no such cache."""
    if files.path is None or not hasattr(os, "posix_fadvise") or not (files.path / name).exists():
        return
    descriptor = os.open(files.path / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _other_bytes(files: Files) -> Iterator[None]:
    try:
        yield
    except Damaged as problem:
        raise OSError(f"{files}: read back after it was written, {problem}") from problem
