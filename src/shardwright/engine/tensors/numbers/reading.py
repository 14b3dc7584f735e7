"""Before ranks read sharded values between steps: if not all ranks read, an error says what the others do.

``norm().item()``, ``max() > 3`` and ``unsharded`` look like calls of one rank. This file knows no tensors and units.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwright.engine import heartbeat
from shardwright.engine.comm import Communicator, Unreached

#: Time that a rank waits for the others. Ranks leave a backward together, so they come within this time.
LIMIT = timedelta(seconds=30)
#: The event in the record of a rank that reads. Events of ``model/divergence.py`` are smaller numbers.
READ = 7
#: The kind of read, in place of a unit's number: a number of a tensor, the full parameters of a model, the states of
#: random generators, the gradient of a value that was read, a value that is joined with a tensor, or a tensor that
#: backward computes with beside a plain one.
NUMBER, FULL, DRAW, GRADIENT, VALUE, BESIDE = range(6)
#: Time that a rank waits for the others in ``unsharded``. A rank may save or evaluate alone before.
LIMIT_OF_FULL = timedelta(minutes=2)


class ReadKind(NamedTuple):
    """The words for a kind of read in errors."""

    verbs: tuple[str, str]  #: in the singular and in the plural
    thing: str
    way_out: str


KINDS = (
    ReadKind(
        ("reads", "read"),
        "a number of a sharded tensor (norm, sum, item, float)",
        "Read it on every rank, and print it on one.",
    ),
    ReadKind(
        ("gathers", "gather"),
        "full parameters (unsharded, stream_weights)",
        "Enter unsharded on every rank, or ask for the next bucket on every rank.",
    ),
    ReadKind(
        ("draws", "draw"),
        "random numbers",
        "Draw them on every rank.",
    ),
    ReadKind(
        ("averages", "average"),
        "the gradient of a value computed from sharded parameters outside forward (a penalty)",
        "Every rank must compute the same penalties of the same parameters in the same order. A rank may multiply the "
        "sum or norm of a parameter by its own factor, which may be 0, but not the parameter itself.",
    ),
    ReadKind(
        ("joins", "join"),
        "a value and a sharded parameter outside forward",
        "The value must be equal on every rank. To weigh a penalty by a rank's own factor, multiply its sum.",
    ),
    ReadKind(
        ("computes", "compute"),
        "in backward, as in a hook, with a sharded parameter and a plain tensor, which differs by rank",
        "The plain tensor must be equal on every rank. A hook that needs a weight for this rank's own data can use a "
        "copy that its module's forward made, such as self.weight.detach().clone().",
    ),
)

#: Called if only some ranks read. It raises an error that says what the others do (``model/divergence.py``).
refuse_divergence: list[Callable[[Communicator, list[list[int]]], None]] = []


def agree_to_read(
    groups: Iterable[dist.ProcessGroup], device: torch.device, what: str, kind: int = NUMBER
) -> None:
    """Wait, on gloo, for the ranks over which a tensor is about to be summed or gathered.

    Args:
        groups: the process groups of the sum or gather, one after another.
        device: the device of their communication.
        what: a number for the kind of tensor, equal on every rank.
        kind: of :data:`KINDS`.

    Raises:
        RuntimeError: another rank does something else, has ended, or does not come in time.
    """
    for group in groups:
        agree_to_read_over(Communicator(group, device), kind, what)


def agree_to_read_over(comm: Communicator, kind: int, what: str = "") -> bool:
    """Wait for the ranks of ``comm`` to make one of the :data:`KINDS` of reads. Raises as :func:`agree_to_read`.

    Returns False if all ranks draw and ``what`` differs.
    """
    if not comm.exchanges:
        return True
    try:
        with heartbeat.inside("agreement before a read", comm.name):
            records = comm.exchange((READ, kind, 0, zlib.crc32(what.encode())), _limit(kind))
    except Unreached as error:
        raise RuntimeError(
            f"Rank {comm.ranks[comm.rank]} {KINDS[kind].verbs[0]} {KINDS[kind].thing} over ranks {comm.ranks}, but "
            f"another of these ranks did not come: it has ended, waits in another collective, or comes later. "
            f"{way_out(kind)} "
            f"({type(error).__name__}: {error})"
        ) from error
    if records is None:
        return True
    if all(record[:2] == [READ, DRAW] for record in records):
        return False
    if any(record[0] != READ for record in records):
        for refuse in refuse_divergence:
            refuse(comm, records)
    texts = {number: f"{KINDS[number].verbs[1]} {KINDS[number].thing}" for number in range(len(KINDS))}
    actions: dict[str, list[int]] = {}
    for rank, (event, number, *_) in zip(comm.ranks, records, strict=True):
        action = texts.get(number, "") if event == READ else "run a unit of a model"
        actions.setdefault(action, []).append(rank)
    doing = "; ".join(f"ranks {ranks} {action}" for action, ranks in actions.items())
    same = ", but these are not all the same" if len(actions) == 1 and kind != BESIDE else ""
    raise RuntimeError(f"The ranks have diverged: {doing}{same}. {KINDS[kind].way_out}")


def way_out(kind: int) -> str:
    """Return advice for users after a rank has waited in vain."""
    return (
        f"{KINDS[kind].way_out} If one rank may come more than {_limit(kind).total_seconds():.0f} s after another, as "
        "after work on one rank alone, call torch.distributed.barrier() before."
    )


def _limit(kind: int) -> timedelta:
    return LIMIT_OF_FULL if kind == FULL else LIMIT
