"""Before ranks read sharded values between steps: if not all ranks read, an error says what the others do.

``norm().item()``, ``max() > 3`` and ``unsharded`` look like calls of one rank. This file knows no tensors and units.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright import board as boards
from shardwright.comm import Communicator, Unreached

#: How long a rank waits for the others. Ranks leave a backward together, so they come within this time.
LIMIT = timedelta(seconds=30)
#: The event in the record of a rank that reads. Events of ``model/divergence.py`` are smaller numbers.
READ = 7
#: The kind of read, in place of a unit's number: a number of a tensor, the full parameters of a model, or the states of
#: random generators.
NUMBER, FULL, DRAW = range(3)
#: How long a rank waits for the others in ``unsharded``. A rank may save or evaluate alone before.
LIMIT_OF_FULL = timedelta(minutes=2)
_TEXTS = (
    (
        "a number (norm, sum, item, float) of a tensor that is sharded",
        "Read it on every rank, and print it on one.",
    ),
    (
        "the full parameters (sw.unsharded, sw.stream_weights) of a model that is sharded",
        "Enter unsharded on every rank, or ask for the next bucket on every rank.",
    ),
    ("the state of its generator, to draw random numbers", "Draw them on every rank."),
)

#: Called if only some ranks read. It raises an error that says what the others do (``model/divergence.py``).
refuse_divergence: list[Callable[[Communicator, list[list[int]]], None]] = []


def agree_to_read(groups: Iterable[dist.ProcessGroup], device: torch.device, what: str) -> None:
    """Meet the ranks over which a tensor is about to be summed or gathered, on gloo.

    Args:
        groups: the process groups of the sum or gather, one after another.
        device: the device of their communication.
        what: a number for the kind of tensor, equal on every rank.

    Raises:
        RuntimeError: another rank does something else, has ended, or does not come in time.
    """
    for group in groups:
        agree_to_read_over(Communicator(group, device), NUMBER, what)


def agree_to_read_over(comm: Communicator, kind: int, what: str = "") -> bool:
    """Meet the ranks of ``comm`` to read a NUMBER, FULL parameters, or to DRAW. Raises as :func:`agree_to_read`.

    Returns False if all ranks draw and ``what`` differs.
    """
    if not comm.exchanges:
        return True
    try:
        with boards.inside("agreement before a read", comm.name):
            records = comm.exchange((READ, kind, 0, zlib.crc32(what.encode())), _limit(kind))
    except Unreached as error:
        raise RuntimeError(
            f"Rank {comm.ranks[comm.rank]} reads {_TEXTS[kind][0]} over ranks {comm.ranks}, but another of these "
            f"ranks did not come: it has ended, waits in another collective, or comes later. {way_out(kind)} "
            f"({type(error).__name__}: {error})"
        ) from error
    if records is None:
        return True
    if all(record[:2] == [READ, DRAW] for record in records):
        return False
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
    """Advice for users after a rank has waited without success."""
    return (
        f"{_TEXTS[kind][1]} If one rank may come more than {_limit(kind).total_seconds():.0f} s after another, as "
        "after work on one rank alone, call torch.distributed.barrier() before."
    )


def _limit(kind: int) -> timedelta:
    return LIMIT_OF_FULL if kind == FULL else LIMIT
