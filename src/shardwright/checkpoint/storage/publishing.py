"""Publication of a save at a place, in three steps: begun, written into an unfinished store, committed.

This is the one way in which files of this package become whole or stay absent: checkpoints by all ranks, and models and
single files by one process. If the process is killed at any moment, the place has what was there, or all that was
written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from shardwright.checkpoint.storage.stores import Store, new_attempt
from shardwright.collective import RankGroup

S = TypeVar("S", bound=Store)


@contextmanager
def publish(
    place: S,
    nbytes: int = 0,
    overwrite: bool = False,
    *,
    attempt: str | None = None,
    names: Iterable[str] = (),
    ranks: RankGroup | None = None,
) -> Iterator[S]:
    """A save: the block writes into the unfinished store, which becomes the place's content after it.

    After an error the place is unchanged.

    Args:
        place: where it appears.
        nbytes, overwrite: as for :meth:`Store.begin`.
        attempt: identity of the save, equal on all ranks. Default: a new one.
        names: of the files that the block may write.
        ranks: that write together. Default: this process alone.

    Raises:
        FileExistsError, OSError: as :meth:`Store.begin` and :meth:`Store.commit`.
    """
    attempt, ranks = attempt or new_attempt(), ranks or RankGroup(alone=True)
    with begun(place, nbytes, overwrite, attempt, names, ranks) as unfinished:
        yield unfinished
        ranks.run_on_first(lambda: place.commit(unfinished, overwrite))


@contextmanager
def begun(
    place: S, nbytes: int, overwrite: bool, attempt: str, names: Iterable[str], ranks: RankGroup
) -> Iterator[S]:
    """The unfinished store of a save that has begun, which every rank sees. It is removed if anything fails.

    :meth:`Store.commit` makes it the place's content, also in another process. Arguments and errors: :func:`publish`.
    """
    unfinished = place.unfinished(attempt)
    try:
        ranks.run_on_first(lambda: place.begin(attempt, nbytes, overwrite))
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
            unfinished.abandon(names)
        raise
