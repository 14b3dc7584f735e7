"""Notes of collectives on the board, for those that torch's functions make and that are not called for each unit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwright import board as boards

_names: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def name_of(group: dist.ProcessGroup | None) -> str:
    """The name of a group on boards. None: all ranks."""
    if group is None:
        return boards.group_name(range(dist.get_world_size()))
    if group not in _names:
        _names[group] = boards.group_name(dist.get_process_group_ranks(group))
    return _names[group]


@contextmanager
def noted(
    collective: str,
    group: dist.ProcessGroup | None = None,
    nbytes: int = 0,
    subject: str = "",
    begins: bool = True,
) -> Iterator[None]:
    """Note that this rank is in a collective of ``group``, as long as the context runs.

    ``begins``: False to wait for the end of one that was begun before.
    """
    board = boards.current
    if board is None:
        yield
        return
    (board.enter if begins else board.await_result)(collective, name_of(group), nbytes, subject)
    try:
        yield
    finally:
        board.leave()
