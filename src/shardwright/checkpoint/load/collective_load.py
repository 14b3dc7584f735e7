"""The steps of a load by all ranks together: compared with its digests, then read into tensors.

A load takes them in this order, so no tensor changes before every rank has found the checkpoint whole. Every rank reads
what its boxes need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from torch import Tensor

from shardwright.checkpoint.format.index import StoredTensor
from shardwright.checkpoint.format.nested import NestedState, StateTensor, nested
from shardwright.checkpoint.format.values import typed
from shardwright.checkpoint.load.checkpoints import Checkpoint
from shardwright.checkpoint.load.fit import check_tensors
from shardwright.checkpoint.load.reading import read_boxes, reads_of
from shardwright.checkpoint.load.replacement import OpenFiles, unless_replaced
from shardwright.checkpoint.storage.threads import Progress, ignore
from shardwright.common.errors import Damaged
from shardwright.engine import RankGroup, heartbeat

Identity = tuple[str, str]  #: the fingerprint and the place of a checkpoint that a rank has opened


def identity_of(checkpoint: Checkpoint) -> Identity:
    return checkpoint.fingerprint, str(checkpoint.place)


def verify_together(checkpoint: Checkpoint, ranks: RankGroup, progress: Progress = ignore) -> None:
    """Compare the files of a checkpoint that every rank has opened with their digests, each rank a share.

    Raises:
        Damaged: on every rank, as :meth:`Checkpoint.verify`.
        OSError: another program has replaced it.
    """

    def compare() -> None:
        with unless_replaced(checkpoint.description_file):
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


@heartbeat.during(heartbeat.LOAD)
def read_state(
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    ranks: RankGroup,
    *,
    first: Callable[[StateTensor], bool] = lambda tensor: False,
    accept: Callable[[dict[str, Any]], None] = lambda values: None,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Read into the tensors of a nested state, in place; return them and the checkpoint's values.

    Every rank must call it. Tensors get their values from any cut and any number of ranks, converted to their dtypes.

    Args:
        checkpoint: one that every rank has found whole (:func:`verify_together`).
        state: nested dicts and lists. Only its tensors count, which fit the stored ones (:func:`check_tensors`).
        first: whether a tensor is read before ``accept`` is called.
        accept: called on every rank with what is returned, after the first tensors are read and before others change;
            may raise.
        progress: gets the number of bytes as they are read.

    Returns:
        The checkpoint's nested state: its values and the tensors of ``state``, under the keys of the save. From a
        folder by torch's writer only the values below the keys of ``state``.

    Raises:
        Damaged: on every rank, if a file can no longer be read. Some tensors may have changed.
    """
    mine = NestedState.of(state)
    with closing(OpenFiles(checkpoint.description_file)) as files:

        def prepare() -> tuple[Mapping[str, StoredTensor], dict[str, Any]]:
            stored = checkpoint.stored_tensors(mine.tensors)
            values = checkpoint.values_below(state.keys(), weights_only=True)
            leaves = {stored[name].path: each.tensor for name, each in mine.tensors.items()} | values
            if any(path[:length] in leaves for path in leaves for length in range(1, len(path))):
                raise Damaged("the description has a value inside another value")
            files.hold(chunk.file for chunk, _, _ in reads_of(stored, mine.tensors.values()))
            return stored, typed(nested(leaves), dict, "the state")

        def read(early: bool) -> None:
            tensors = [each for each in mine.tensors.values() if first(each) == early]
            read_boxes(files, stored, tensors, progress)
            if early:
                accept(content)

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
