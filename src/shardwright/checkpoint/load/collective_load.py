"""Reads a checkpoint into tensors: examined, compared with its digests, and only then read, by all ranks together.

Every rank reads what its boxes need. No function here changes a tensor before every rank has found the checkpoint
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from shardwright import board as boards
from shardwright.checkpoint.format.checks import typed
from shardwright.checkpoint.format.index import StoredTensor
from shardwright.checkpoint.format.nested import NestedState, Progress, StateTensor, ignore, nested
from shardwright.checkpoint.load.checkpoints import Checkpoint, read_description
from shardwright.checkpoint.load.fit import check_tensors, make_alike
from shardwright.checkpoint.load.reading import read_boxes, reads_of
from shardwright.checkpoint.load.replacement import OpenFiles, unless_replaced
from shardwright.checkpoint.storage.locations import Location
from shardwright.collective import RankGroup
from shardwright.errors import Damaged

Identity = tuple[str, str]  #: the fingerprint and the place of a checkpoint that a rank has opened


def identity_of(checkpoint: Checkpoint) -> Identity:
    return checkpoint.fingerprint, str(checkpoint.place)


def open_together(read: Callable[[], Checkpoint], ranks: RankGroup) -> Checkpoint:
    """The checkpoint whose description every rank reads. Its files may be damaged. Every rank must call it.

    Raises:
        Exception: the error of ``read``, on every rank.
        OSError, ValueError: as :func:`check_same_description`.
    """
    checkpoint, identities = ranks.run_and_share(read, identity_of)
    check_same_description(identities, ranks)
    return checkpoint


def verify_together(checkpoint: Checkpoint, ranks: RankGroup, progress: Progress = ignore) -> None:
    """Compare the files of a checkpoint that every rank has opened with their digests, each rank a share.

    Raises:
        Damaged: on every rank, as :meth:`Checkpoint.verify`.
        OSError: another program has replaced it.
    """

    def compare() -> None:
        with unless_replaced(checkpoint.origin, checkpoint.fingerprint):
            checkpoint.verify(ranks.rank, ranks.size, progress)

    ranks.run_on_all(compare)


def check_same_description(identities: Sequence[Identity], ranks: RankGroup) -> None:
    """Compare the checkpoints that the ranks have opened.

    Raises:
        ValueError: two ranks have opened different checkpoints at different places.
        OSError: at the same place.
    """

    def error(others: list[int], *_: str) -> Exception:
        rank, first = others[0], identities[0][1]
        if (place := identities[rank][1]) != first:
            return ValueError(
                f"rank {rank} loads {place}, and rank 0 {first}, which is another checkpoint. Pass the same path on "
                "every rank"
            )
        return OSError(
            f"{place}: rank {rank} reads another checkpoint there than rank 0. Either another program has just "
            "replaced it: load it again. Or the ranks do not share this file system"
        )

    ranks.check_equal([fingerprint for fingerprint, _ in identities], error)


@boards.during(boards.LOAD)
def load_state(
    source: Location | Checkpoint,
    state: Mapping[str, Any],
    ranks: RankGroup,
    *,
    check: Callable[[], None] = lambda: None,
    first: Callable[[StateTensor], bool] = lambda tensor: False,
    accept: Callable[[dict[str, Any]], None] = lambda values: None,
    weights_only: bool = True,
    convert: bool = False,
    advice: Callable[[str, torch.dtype], str] = make_alike,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Read into the tensors of a nested state, in place; return them and the checkpoint's values.

    Every rank must call it. Tensors of the state get their values from any cut and any number of ranks.

    Args:
        source: the checkpoint's folder or URL; or the checkpoint, which every rank has opened.
        state: nested dicts and lists. Only its tensors count; its values are not changed.
        check: called on every rank before anything is read; may raise.
        first: whether a tensor is read before ``accept`` is called.
        accept: called on every rank with what is returned, after the first tensors are read and before others change;
            may raise.
        weights_only: for values in torch's folders, as for ``torch.load``.
        convert: tensors may have other dtypes than the stored ones.
        advice: ends the error for a tensor of this name that is stored in this other dtype.
        progress: gets the number of bytes as they are compared and read.

    Returns:
        The checkpoint's nested state: its values and the tensors of ``state``, under the keys of the save. From a
        folder by torch's writer only the values below the keys of ``state``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        Damaged: it is not whole. No tensor was changed, unless a file could be read at first and then not again.
        ValueError: a tensor is missing in it, or has another shape or dtype. No tensor was changed.
    """
    mine = NestedState.of(state)

    def fit() -> None:
        check()
        check_tensors(checkpoint, mine.tensors, convert, advice)

    checkpoint = (
        source if isinstance(source, Checkpoint) else open_together(lambda: read_description(source), ranks)
    )
    ranks.run_on_all(fit)
    verify_together(checkpoint, ranks, progress)
    return read_state(
        checkpoint, state, ranks, first=first, accept=accept, weights_only=weights_only, progress=progress
    )


@boards.during(boards.LOAD)
def read_state(
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    ranks: RankGroup,
    *,
    first: Callable[[StateTensor], bool] = lambda tensor: False,
    accept: Callable[[dict[str, Any]], None] = lambda values: None,
    weights_only: bool = True,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Read a checkpoint that is known to be whole and to have the state's tensors, as :func:`load_state` does.

    Tensors of another dtype get converted values. Every rank must call it.

    Raises:
        Damaged: on every rank, if a file can no longer be read. Some tensors may have changed.
    """
    mine = NestedState.of(state)

    def prepare() -> tuple[Mapping[str, StoredTensor], dict[str, Any]]:
        stored = checkpoint.parts_of(mine.tensors)
        values = checkpoint.values_below(state.keys(), weights_only)
        leaves = {stored[name].path: each.tensor for name, each in mine.tensors.items()} | values
        if any(path[:length] in leaves for path in leaves for length in range(1, len(path))):
            raise Damaged("the description has a value inside another value")
        files.hold(part.file for part, _, _ in reads_of(stored, mine.tensors.values()))
        return stored, typed(nested(leaves), dict, "the state")

    def read(early: bool) -> None:
        tensors = [each for each in mine.tensors.values() if first(each) == early]
        read_boxes(files, stored, tensors, progress)
        if early:
            accept(content)

    with closing(OpenFiles(checkpoint.place, checkpoint.origin, checkpoint.fingerprint)) as files:
        stored, content = ranks.run_own(prepare)
        ranks.run_on_all(lambda: read(True))
        ranks.run_on_all(lambda: read(False))
    return content


def read_tensors(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], ranks: RankGroup, progress: Progress = ignore
) -> None:
    """Read into tensors, by the names of the checkpoint; they have the stored shapes. Every rank must call it.

    Args:
        checkpoint: one that every rank has found whole.
        tensors: with memory on this rank. Values are converted to their dtypes.

    Raises:
        Damaged: a file could be read before and cannot be read now; or a file of torch's writer holds another tensor
            than its ``.metadata`` says, and nothing has changed.
        ValueError: the checkpoint has no tensor of a name, or one of another shape.
    """
    named = NestedState.of(tensors).tensors
    ranks.run_on_all(lambda: check_tensors(checkpoint, named, convert=True))
    read_state(checkpoint, tensors, ranks, progress=progress)
