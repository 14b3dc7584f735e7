"""How the ranks of a gloo group meet before each collective: what each is about to do, and who has left.

A wrong pairing of collectives aborts the process or hangs, so the ranks show each other a record first. What they have
agreed on is begun on every rank, even where a signal's handler raises in between. A rank that leaves by an exception
shows that where the others come next, and does not wait for them. So the collectives of the group stay in order.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import operator
import re
import struct
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwright._torch import AllToAllOptions, backend_for
from shardwright.comm import notices

RECORD = 6  #: integers that ranks show each other
LEFT = -1  #: the first of a record by which a rank says that it has left
_FAILURE = 2  #: where such a record has the number of the failure
#: How long a rank that has left stays reachable for the others. Then its connections close, and theirs fail.
REACHABLE = timedelta(seconds=60)

#: What gloo says where another rank does not come, or its connection has ended.
_OF_CONNECTIONS = re.compile(r"gloo/|time|connection|closed|reset|peer", re.IGNORECASE)

_call: Callable[[Any], Any] = operator.call
#: One for each group and device, by the group's name: ranks come to a group in one order, whoever asks.
_meetings: weakref.WeakValueDictionary[tuple[str, torch.device], Meeting] = weakref.WeakValueDictionary()
#: Failures that this rank knows of, the newest last. Who has left by one of these has left for nobody here.
_known_failures: deque[int] = deque(maxlen=64)
_failures = itertools.count(1)


class Unreached(RuntimeError):
    """Another rank has not come. The message says which one and why, where that is known."""


class Begun:
    """A collective that the ranks have agreed on, known here until somebody has waited for it."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self.works: list[Any] = []

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                try:
                    self._meeting.wait_for(work)
                except Unreached as error:
                    text = f"Rank {dist.get_rank()} waits for the end of a collective, and {error}"
                    raise Unreached(text) from error.__cause__
        self._meeting.begun.discard(self)

    def is_over(self) -> bool:
        return all(work is None or getattr(work, "is_completed", bool)() for work in self.works)


def meeting_of(group: dist.ProcessGroup, device: torch.device) -> Meeting:
    """Where the ranks of a group meet."""
    key = (group.group_name, device)
    meeting = _meetings.get(key)
    if (
        meeting is None or meeting._group is not group
    ):  # a group made later may have the name of one destroyed
        meeting = _meetings[key] = Meeting(group, device)
    return meeting


def new_failure() -> int:
    """A number for a failure of this rank's own; no other failure of any rank has it."""
    failure = dist.get_rank() << 32 | next(_failures)
    _known_failures.append(failure)
    return failure


class _Records:
    """A record for each rank of a group. Python reads and writes the tensor's memory; no operation of torch does."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        #: For collectives; of shape (ranks * RECORD,) and dtype int64.
        self.tensor = torch.zeros(ranks * RECORD, dtype=torch.int64, device="cpu")
        self._memory = (ctypes.c_char * self.tensor.nbytes).from_address(self.tensor.data_ptr())

    def write(self, record: Sequence[int]) -> None:
        """One record, at most RECORD integers, for every rank."""
        self._memory.raw = struct.pack(f"={RECORD}q", *record, *[0] * (RECORD - len(record))) * self._ranks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Records) and self._memory.raw == other._memory.raw

    def rows(self) -> list[list[int]]:
        return [list(row) for row in struct.iter_unpack(f"={RECORD}q", self._memory.raw)]


class Meeting:
    """Where the ranks of one group meet. See :func:`meeting_of`.

    A rank may leave by one failure more often than the others come, so each failure has a number: who knows of it takes
    a further record of it for nothing and shows the own one again.

    Attributes:
        number: how often they have met and agreed.
        begun: collectives that nobody has waited for yet.
        failure: by which they did not agree when they met last.
        failures: how many this rank has heard of or shown here; as many on every rank of the group.
        left_by: the failure by which this rank has left since it last entered a model.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._ranks = dist.get_process_group_ranks(group)
        self._mine, self._theirs = _Records(len(self._ranks)), _Records(len(self._ranks))
        self._works: list[Any] = []  #: of a meeting that is under way, or where the ranks did not agree
        self._left: list[tuple[Any, Any]] = []  #: what was shown in leaving, with its memory
        self.number = 0
        self._next = 0  #: ``number`` once they agree; assigned, not added, as an interrupt may make it twice
        self.begun: set[Begun] = set()
        self.failure = self.left_by = self.failures = 0
        self._disagreements = 0
        _wait_for_workers_at_exit()
        notices.post_at_exit()

    def show(self, record: Sequence[int], limit: timedelta | None = None) -> list[list[int]] | None:
        """Show every rank ``record`` (at most RECORD integers); return all ranks' if they are not the same.

        Waits for the other ranks, at most for ``limit`` (default: the group's timeout). It does not pass through
        torch's dispatcher, so modes that count collectives see those of the step only, and it is an all-to-all, which
        pairs with none of the collectives that users call.

        Raises:
            Unreached: another rank does not come.
        """
        self._works.clear()
        self._mine.write(record)
        self._next = self.number + 1
        while True:
            self._works.clear()
            self._begin(self._works, self._theirs, self._mine, AllToAllOptions())
            self.wait_for(self._works[0], limit)
            if self._theirs == self._mine:
                self.number = self._next
                self._works.clear()
                return None
            rows = self._theirs.rows()
            failures = {row[_FAILURE] for row in rows if row[0] == LEFT}
            if not failures or not failures.issubset(_known_failures):
                self._note_failure(failures)
                return rows

    def _note_failure(self, failures: set[int]) -> None:
        """They do not agree. Without a failure of one rank's it is one of all, and has one number on all of them."""
        self._disagreements += 1
        self.failures += 1
        name = f"{self._group.group_name} {self.number} {self._disagreements}"
        self.failure = min(failures, default=1 << 62 | zlib.crc32(name.encode()))
        _known_failures.extend(failures or [self.failure])

    def begin(self, announce: Callable[[], None], collective: Callable[[], Any]) -> Begun:
        """Call ``announce``, which shows a record here, then ``collective``, which returns a work or None.

        Once the ranks have agreed, all begin it: a signal's handler that raises on this one does so after that.
        """
        self._works.clear()
        self.begun -= {each for each in self.begun if each.is_over()}
        number, begun, calls = self.number, Begun(self), list[Any]()
        try:
            announce()
            self.begun.add(begun)
            # No Python runs between the two, so a collective that is no Python has begun if the first was called.
            begun.works.extend(map(_call, (functools.partial(calls.append, True), collective)))
        except BaseException:
            if not calls and self.agreed() and self.number > number:
                with suppress(Exception):
                    begun.works.append(collective())
                    begun.wait()
            raise
        return begun

    def agreed(self, limit: timedelta | None = None) -> bool:
        """Whether the ranks agreed when they met last. Where that was interrupted, it is waited for."""
        if self._works:
            try:
                self.wait_for(self._works[0], limit)
            except Exception:
                return False
            if self._theirs != self._mine:
                return False
            self.number = self._next
            self._works.clear()
        return True

    def disagreed(self) -> bool:
        """Whether all ranks came when they met last, and showed different records."""
        return bool(self._works) and self._works[0].is_completed() and not self.agreed()

    def settle(self) -> None:
        """Wait for collectives that have begun and may have been forgotten. Their memory is about to be used again."""
        for begun in list(self.begun):
            with suppress(Exception):
                begun.wait()
            self.begun.discard(begun)

    def leave(self, failure: int, record: Sequence[int]) -> None:
        """Show that this rank has left where the others come next, without waiting for them; once for each failure.

        Args:
            failure: by which it has left.
            record: the rest of what they see, after the failure's number.
        """
        if self.left_by == failure:
            return
        self.left_by = failure
        self.failures += 1
        self._left = [each for each in self._left if not each[0].is_completed()]
        mine, theirs = _Records(len(self._ranks)), _Records(len(self._ranks))
        mine.write([LEFT, 0, failure, *record])
        options = AllToAllOptions()
        options.timeout = REACHABLE
        works: list[Any] = []
        self._begin(works, theirs, mine, options)
        self._left.append((works[0], (mine, theirs)))

    def _begin(self, works: list[Any], theirs: _Records, mine: _Records, options: Any) -> None:
        """Issue the all-to-all; no Python runs between its begin and its place in ``works``."""
        backend = backend_for(self._group, self._device)
        works.extend(map(backend.alltoall_base, (theirs.tensor,), (mine.tensor,), ([],), ([],), (options,)))

    def wait_for(self, work: Any, limit: timedelta | None = None) -> None:
        """Wait for a collective of the group. What a signal's handler raises meanwhile is raised as it is."""
        try:
            work.wait() if limit is None else work.wait(limit)
        except RuntimeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            if not _OF_CONNECTIONS.search(str(error)):
                raise  # this rank's own: a number or a size that gloo does not take
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise Unreached(f"{self._who_is_missing()} ({reason}){self._own_leaving()}") from error

    def notices(self, ranks: Sequence[int]) -> dict[int, str]:
        """Reasons of those ranks that have left since the group met last, by rank."""
        return notices.read(ranks, self._group.group_name, self.number)

    def _who_is_missing(self) -> str:
        others = [rank for rank in self._ranks if rank != dist.get_rank()]
        known = self.notices(others)
        if known:
            return "; ".join(f"rank {rank} {what}" for rank, what in known.items())
        who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(map(str, others))}"
        return f"{who} did not come: it ended, or waits in another collective, or is later than the group's timeout"

    def _own_leaving(self) -> str:
        """By what this rank itself has left since the group met last, which is why others may not come."""
        left = notices.own(self._group.group_name, self.number)
        return f". This rank {left} before, and where one rank leaves a step, all must." if left else ""


def _numbers() -> dict[str, int]:
    return {meeting._group.group_name: meeting.number for meeting in _meetings.values()}


notices.count_by(_numbers)


@functools.cache
def _wait_for_workers_at_exit() -> None:
    """Let gloo's worker threads come to rest before the interpreter ends; destroyed groups have them, too.

    After a collective its worker gives the tensors back, for which it needs the interpreter. One that asks for it
    while it ends makes the process abort ("terminate called without an active exception"). Nothing says when a worker
    is through, and sleeping lets it have the interpreter.
    """
    atexit.register(time.sleep, 0.1)
