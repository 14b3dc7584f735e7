"""Before ranks read what is sharded between steps: all of them come, or an error says what they do instead.

``norm().item()``, ``max() > 3`` and ``unsharded`` look like calls of one rank. Tensors and units are not known here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.comm import Communicator, Unreached

#: How long a rank waits for the others. Ranks leave a backward together, so it is longer than they can be apart.
LIMIT = timedelta(seconds=30)
#: What a rank that reads shows the others in the place of the event. Those of ``model/divergence.py`` are smaller.
READ = 7
#: What is read, in the place of a unit's number: a number of a tensor, or the full parameters of a model.
NUMBER, FULL = range(2)
#: How long a rank waits for the others where it shows full parameters: one of them may have saved or evaluated before.
LIMIT_OF_FULL = timedelta(minutes=2)
_TEXTS = (
    (
        "a number (norm, sum, item, float) of a tensor that is sharded",
        "Read it on every rank, and print it on one.",
    ),
    ("the full parameters (sw.unsharded) of a model that is sharded", "Enter unsharded on every rank."),
)

#: Called where some ranks read and others do not, to raise in the words of who knows what these do
#: (``model/divergence.py``).
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
        agree_to_read_over(Communicator(group, device), NUMBER, what)


def agree_to_read_over(comm: Communicator, kind: int, what: str = "") -> None:
    """Come together with the ranks of ``comm`` to read a NUMBER or FULL parameters. Raises as :func:`agree_to_read`."""
    if not comm.exchanges:
        return
    try:
        records = comm.exchange((READ, kind, 0, zlib.crc32(what.encode())), _limit(kind))
    except Unreached as error:
        raise RuntimeError(
            f"Rank {comm.ranks[comm.rank]} reads {_TEXTS[kind][0]} over ranks {comm.ranks}, but another of these "
            f"ranks did not come: it has ended, waits in another collective, or comes later. {way_out(kind)} "
            f"({type(error).__name__}: {error})"
        ) from error
    if records is None:
        return
    readers = [rank for rank, record in zip(comm.ranks, records, strict=True) if record[0] == READ]
    if readers != comm.ranks:
        for refuse in refuse_divergence:
            refuse(comm, records)
    others = [rank for rank in comm.ranks if rank not in readers]
    rest = f"ranks {others} run a unit of a model" if others else "not all the same"
    raise RuntimeError(
        f"The ranks have diverged: ranks {readers} of {comm.ranks} read a number of a sharded tensor (norm, sum, "
        f"item, float) or full parameters (unsharded), and {rest}. Every rank must read the same values in the same "
        "order."
    )


def way_out(kind: int) -> str:
    """What a user can do where a rank has waited in vain."""
    return (
        f"{_TEXTS[kind][1]} If one rank may come more than {_limit(kind).total_seconds():.0f} s after another, as "
        "after work on one rank alone, call torch.distributed.barrier() before."
    )


def _limit(kind: int) -> timedelta:
    return LIMIT_OF_FULL if kind == FULL else LIMIT
