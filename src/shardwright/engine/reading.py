"""Before ranks sum up a number of a sharded tensor: all of them come, or an error says what they do instead.

``norm().item()`` and ``max() > 3`` look like calls of one rank. Tensors and units are not known here.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.comm import Communicator, Unreached

#: How long a rank waits for the others. Ranks leave a backward together, so it is longer than they can be apart.
LIMIT = timedelta(seconds=30)
#: What a rank that reads shows the others in the place of the event. Those of ``agreement.py`` are smaller.
READ = 7

_comms: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()
#: Called where some ranks read and others do not, to raise in the words of who knows what these do (``agreement.py``).
refuse_divergence: list[Callable[[Communicator, list[list[int]]], None]] = []


def agree_to_read(groups: Iterable[dist.ProcessGroup], device: torch.device, what: str) -> None:
    """Come together with the ranks over which a tensor is about to be summed up or gathered, on gloo.

    Args:
        groups: those over which it is, one after another.
        device: where they communicate.
        what: stands for the kind of tensor; the same on every rank.

    Raises:
        RuntimeError: another rank is about to do something else, has ended, or does not come in time.
    """
    for group in groups:
        if group not in _comms:
            _comms[group] = Communicator(group, device)
        if _comms[group].exchanges:
            _agree(_comms[group], what)


def _agree(comm: Communicator, what: str) -> None:
    try:
        records = comm.exchange((READ, 0, 0, zlib.crc32(what.encode())), LIMIT)
    except Unreached as error:
        raise RuntimeError(
            f"Rank {comm.ranks[comm.rank]} reads a number (norm, sum, item, float) of a tensor that is sharded over "
            f"ranks {comm.ranks}, and another of them did not come: it has ended, or waits in another collective, or "
            f"comes more than {LIMIT.total_seconds():.0f} s later. Read it on every rank, and print it on one. Where "
            "ranks are further apart, as after work of one rank alone, call torch.distributed.barrier() before. "
            f"({type(error).__name__}: {error})"
        ) from error
    if records is None:
        return
    readers = [rank for rank, record in zip(comm.ranks, records, strict=True) if record[0] == READ]
    if readers != comm.ranks:
        for refuse in refuse_divergence:
            refuse(comm, records)
    rest = "not all the same" if readers == comm.ranks else "the others run a unit of a model"
    raise RuntimeError(
        f"The ranks have diverged: ranks {readers} of {comm.ranks} read a number of a sharded tensor (norm, sum, item, "
        f"float), and {rest}. Every rank must read the same numbers in the same order."
    )
