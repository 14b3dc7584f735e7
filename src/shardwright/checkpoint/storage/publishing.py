"""Publication of a save, in three steps: begun, written, committed.

This is the one way in which files of this package become whole or stay absent: checkpoints by all ranks, and models and
single files by one process. If the process is killed at any moment, the place has what was there, or all that was
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from shardwright.checkpoint.storage.local_store import SingleFile
from shardwright.checkpoint.storage.stores import Check, Publication, trust
from shardwright.common.durable import new_file
from shardwright.engine import RankGroup

Save = TypeVar("Save", bound=Publication)


@contextmanager
def publish(
    save: Save,
    nbytes: int = 0,
    overwrite: bool = False,
    *,
    names: Iterable[str] = (),
    ranks: RankGroup | None = None,
    check: Check = trust,
) -> Iterator[Save]:
    """A save: the block writes its files, which become the content of its place after the block.

    After an error the place is unchanged.

    Args:
        save: equal on all ranks.
        nbytes, overwrite, check: as for :meth:`Publication.begin`.
        names: of the files that the block may write.
        ranks: that write together. Default: this process alone.

    Raises:
        FileExistsError, OSError: as :meth:`Publication.begin` and :meth:`Publication.commit`.
    """
    ranks = ranks or RankGroup(alone=True)
    with begun(save, nbytes, overwrite, names, ranks, check):
        yield save
        ranks.run_on_first(lambda: save.commit(overwrite))


@contextmanager
def begun(
    save: Publication,
    nbytes: int,
    overwrite: bool,
    names: Iterable[str],
    ranks: RankGroup,
    check: Check,
) -> Iterator[None]:
    """A save that has begun, which every rank sees. It is abandoned if the block fails.

    :meth:`Publication.commit` ends it, also in another process. Arguments and errors: :func:`publish`.
    """
    place = str(save.store)
    try:
        ranks.run_on_first(lambda: save.begin(nbytes, overwrite, check))
        first = ranks.broadcast(place)

        def see() -> None:
            try:
                save.check_seen()
            except OSError:
                if place != first:
                    raise ValueError(
                        f"this rank saves to {place}, and rank 0 to {first}. Pass the same path on every rank"
                    ) from None
                raise

        ranks.run_on_all(see)
        yield
    except BaseException:
        if ranks.is_first:
            save.abandon(names)
        raise


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write one file in the place of a checkpoint: ``write`` gets the new file, open for writing in binary mode.

    A file or checkpoint at ``path`` stays until the new file is whole and on disk.

    Raises:
        OSError: it cannot be written. The message names ``path``, and anything there is unchanged.
    """
    try:
        with (
            publish(SingleFile(path).unfinished(), overwrite=True) as save,
            new_file(save.path) as stream,
        ):
            write(stream)
    except BaseException as error:
        reason = (
            error.__context__ if isinstance(error, RuntimeError) else error
        )  # torch.save reports another error
        if isinstance(reason, OSError) and reason.errno is not None:
            raise OSError(reason.errno, reason.strerror, str(path)) from error
        raise
