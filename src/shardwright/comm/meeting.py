"""How the ranks of a gloo group meet before each collective: what each is about to do, and who has left.

A wrong pairing of collectives aborts the process or hangs, so the ranks show each other a record first. What they have
agreed on is begun on every rank, even where a signal's handler raises in between. A rank that leaves by an exception
shows that where the others come next, and does not wait for them. So the collectives of the group stay in order.

A group first meets by gloo. In those records ranks of one host find each other's pages (``pages.py``), and once all
have found all, they meet there, which takes a few microseconds. A record that all ranks have seen decides that, so all
go there together.
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
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist

from shardwright._torch import AllToAllOptions, backend_for, timeout_of
from shardwright.comm import notices, pages
from shardwright.comm.pages import NOWHERE, SLOTS, WORDS, Address, Gone, OtherRing, Ring

RECORD = WORDS  #: integers that ranks show each other
LEFT = -1  #: the first of a record by which a rank says that it has left
_FAILURE = 2  #: where such a record has the number of the failure
#: How long a rank that has left stays reachable for the others. Then its connections close, and theirs fail.
REACHABLE = timedelta(seconds=60)

#: What gloo says where another rank does not come, or its connection has ended.
_OF_CONNECTIONS = re.compile(r"gloo/|time|connection|closed|reset|peer", re.IGNORECASE)

_call: Callable[[Any], Any] = operator.call
#: One for each group and device, as long as the group: ranks come to it in one order, whoever asks.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Meeting]] = (
    weakref.WeakKeyDictionary()
)
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
    meetings = _meetings.setdefault(group, {})
    if device not in meetings:
        meetings[device] = Meeting(group, device)
    return meetings[device]


def new_failure() -> int:
    """A number for a failure of this rank's own; no other failure of any rank has it."""
    failure = dist.get_rank() << 32 | next(_failures)
    _known_failures.append(failure)
    return failure


def _packed(record: Sequence[int]) -> bytes:
    return struct.pack(f"={RECORD}q", *record, *[0] * (RECORD - len(record)))


def _unpacked(record: bytes) -> list[int]:
    return list(struct.unpack(f"={RECORD}q", record))


class _Records:
    """A row for each rank of a group. Python reads and writes the tensor's memory; no operation of torch does.

    A row is a record, the address of its rank's ring, and whether that rank has found all others' rings.
    """

    _row = struct.Struct(f"={RECORD + len(NOWHERE) + 1}q")

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        #: For collectives; flat, int64.
        self.tensor = torch.zeros(ranks * self._row.size // 8, dtype=torch.int64, device="cpu")
        self._memory = (ctypes.c_char * self.tensor.nbytes).from_address(self.tensor.data_ptr())

    def write(self, record: bytes, address: Address, found: bool) -> None:
        """One row, for every rank."""
        self._memory.raw = self._row.pack(*_unpacked(record), *address, found) * self._ranks

    def rows(self) -> list[tuple[int, ...]]:
        return list(self._row.iter_unpack(self._memory.raw))


class Round(Protocol):
    """One time that the ranks meet."""

    @property
    def begun(self) -> bool:
        """Whether this rank has shown its record."""

    def begin(self) -> None:
        """Show it. An interrupt comes before that or after it."""

    def wait(self, limit: timedelta | None) -> None:
        """For the other ranks."""

    def is_over(self) -> bool:
        """Whether all ranks have shown theirs."""

    def records(self) -> list[bytes]:
        """All ranks', once it is over."""


class _ByGloo:
    """An all-to-all: it passes through no dispatcher, and pairs with none of the collectives that users call."""

    def __init__(self, backend: Any, mine: _Records, theirs: _Records, options: Any) -> None:
        self._backend = backend
        self._mine = mine
        self._theirs = theirs
        self._options = options
        self._works: list[Any] = []

    @property
    def begun(self) -> bool:
        return bool(self._works)

    def begin(self) -> None:
        # No Python runs between its begin and its place in the list.
        tensors = (self._theirs.tensor,), (self._mine.tensor,)
        self._works.extend(map(self._backend.alltoall_base, *tensors, ([],), ([],), (self._options,)))

    def wait(self, limit: timedelta | None) -> None:
        work = self._works[0]
        work.wait() if limit is None else work.wait(limit)

    def is_over(self) -> bool:
        return bool(self._works[0].is_completed())

    def records(self) -> list[bytes]:
        return [_packed(row[:RECORD]) for row in self._theirs.rows()]

    def rows(self) -> list[tuple[int, ...]]:
        return self._theirs.rows()


class _ByPages:
    """Records in memory that the ranks share."""

    def __init__(self, hall: _Hall, number: int, record: bytes, timeout: timedelta) -> None:
        self._hall = hall
        self._number = number
        self._record = record
        self._timeout = timeout
        self._records: list[bytes] = []

    @property
    def begun(self) -> bool:
        return self._hall.mine.last >= self._number

    def begin(self) -> None:
        while not self._hall.has_room(
            self._number
        ):  # this rank has left many times, and the others did not come yet
            time.sleep(0.01)
        self._hall.mine.write(self._number, self._record)

    def wait(self, limit: timedelta | None) -> None:
        until = time.monotonic() + (self._timeout if limit is None else limit).total_seconds()
        self._records.clear()  # an interrupted wait is repeated
        self._records = [
            self._record if ring is None else _await(ring, rank, self._number, until)
            for rank, ring in self._hall.rings
        ]

    def is_over(self) -> bool:
        return all(ring is None or ring.read(self._number) is not None for _, ring in self._hall.rings)

    def records(self) -> list[bytes]:
        if not self._records:
            self.wait(None)
        return self._records


class _Missing(Exception):
    """A rank does not come."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


def _await(ring: OtherRing, rank: int, number: int, until: float) -> bytes:
    try:
        return ring.wait(number, until)
    except Gone as error:
        raise _Missing(rank, str(error)) from None


class _Hall(NamedTuple):
    """The rings of a group's ranks on one host."""

    mine: Ring
    rings: list[tuple[int, OtherRing | None]]  #: by rank; None: this rank's

    def has_room(self, number: int) -> bool:
        """Whether a record of this number takes the place of one that all have gone past."""
        past = number - SLOTS + 1
        return past <= 0 or all(ring is None or ring.has_written(past) for _, ring in self.rings)


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
        self._group_ref = weakref.ref(group)
        self._name = group.group_name
        self._device = device
        self._ranks = dist.get_process_group_ranks(group)
        self._mine, self._theirs = _Records(len(self._ranks)), _Records(len(self._ranks))
        self._ring = pages.new_ring()
        self._found: _Hall | None = None  #: once this rank has found the rings of all others
        self._hall: _Hall | None = None  #: the same, once all ranks have
        self._round: Round | None = None  #: that is under way, or where the ranks did not agree
        self._left: list[tuple[_ByGloo, Any]] = []  #: what was shown in leaving, with its memory
        self.number = 0
        self._next = 0  #: ``number`` once they agree; assigned, not added, as an interrupt may make it twice
        self.begun: set[Begun] = set()
        self.failure = self.left_by = self.failures = 0
        self._disagreements = 0
        _wait_for_workers_at_exit()
        notices.post_at_exit()

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        assert group is not None  # the communicator that asks has it
        return group

    def show(self, record: Sequence[int], limit: timedelta | None = None) -> list[list[int]] | None:
        """Show every rank ``record`` (at most RECORD integers); return all ranks' if they are not the same.

        Waits for the other ranks, at most for ``limit`` (default: the group's timeout). Modes that count collectives
        do not see it.

        Raises:
            Unreached: another rank does not come.
        """
        if self._round is not None:
            self._leave_round(limit)
        self._next = self.number + 1
        mine = _packed(record)
        while True:
            current = self._round = self._new_round(mine)
            current.begin()
            self._wait_for(current.wait, limit)
            records = current.records()
            self._look_for_pages(current)
            if all(each == mine for each in records):
                self.number = self._next
                self._round = None
                return None
            rows = [_unpacked(each) for each in records]
            failures = {row[_FAILURE] for row in rows if row[0] == LEFT}
            if not failures or not failures.issubset(_known_failures):
                self._note_failure(failures)
                return rows

    def _new_round(self, record: bytes) -> Round:
        backend = backend_for(self._group, self._device)
        if self._hall is not None:
            return _ByPages(self._hall, self._hall.mine.last + 1, record, timeout_of(backend))
        address = self._ring.address if self._ring is not None else NOWHERE
        self._mine.write(record, address, self._found is not None)
        return _ByGloo(backend, self._mine, self._theirs, AllToAllOptions())

    def _leave_round(self, limit: timedelta | None) -> None:
        """Before the next round: this one was interrupted, or the ranks did not agree there.

        What it has shown may be that all ranks have found all pages, so by gloo it is waited for.
        """
        current = self._round
        if self._ring is not None and isinstance(current, _ByGloo) and current.begun:
            self._wait_for(current.wait, limit)
            self._look_for_pages(current)
        self._round = None

    def _look_for_pages(self, current: Round) -> None:
        """Find the rings of the ranks that were in this round; if all had found all by then, meet there from now on.

        A rank that has left did not wait for the round, and does not know what the others have shown in it.
        """
        if self._ring is None or self._hall is not None or not isinstance(current, _ByGloo):
            return
        rows = current.rows()
        addresses = [Address(*row[RECORD:-1]) for row in rows]
        if any(row[0] == LEFT for row in rows) or NOWHERE in addresses:
            return
        if self._found is not None and all(row[-1] for row in rows):
            self._hall = self._found
        elif self._found is None:
            mine = self._ring.address
            try:
                rings = [None if each == mine else pages.other_ring(each) for each in addresses]
            except OSError:
                self._ring = None  # some are on other hosts
            else:
                self._found = _Hall(self._ring, list(zip(self._ranks, rings, strict=True)))

    def _note_failure(self, failures: set[int]) -> None:
        """They do not agree. Without a failure of one rank's it is one of all, and has one number on all of them."""
        self._disagreements += 1
        self.failures += 1
        name = f"{self._name} {self.number} {self._disagreements}"
        self.failure = min(failures, default=1 << 62 | zlib.crc32(name.encode()))
        _known_failures.extend(failures or [self.failure])

    def begin(self, announce: Callable[[], None], collective: Callable[[], Any]) -> Begun:
        """Call ``announce``, which shows a record here, then ``collective``, which returns a work or None.

        Once the ranks have agreed, all begin it: a signal's handler that raises on this one does so after that.
        """
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
        current = self._round
        if current is not None and current.begun:
            try:
                self._wait_for(current.wait, limit)
                records = current.records()
            except Exception:
                return False
            self._look_for_pages(current)
            if any(each != records[0] for each in records):
                return False
            self.number = self._next
        self._round = None
        return True

    def disagreed(self) -> bool:
        """Whether all ranks came when they met last, and showed different records."""
        current = self._round
        return current is not None and current.begun and current.is_over() and not self.agreed()

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
        shown = _packed([LEFT, 0, failure, *record])
        hall = self._hall
        if hall is not None:
            number = hall.mine.last + 1
            if hall.has_room(number):  # else the others have not come for many failures of this rank's
                hall.mine.write(number, shown)
            return
        self._left = [each for each in self._left if not each[0].is_over()]
        mine, theirs = _Records(len(self._ranks)), _Records(len(self._ranks))
        mine.write(shown, NOWHERE, False)
        options = AllToAllOptions()
        options.timeout = REACHABLE
        leaving = _ByGloo(backend_for(self._group, self._device), mine, theirs, options)
        leaving.begin()
        self._left.append((leaving, (mine, theirs)))

    def wait_for(self, work: Any) -> None:
        """Wait for a collective of the group. What a signal's handler raises meanwhile is raised as it is."""
        try:
            work.wait()
        except RuntimeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            self._raise_unreached(error)

    def _wait_for(self, wait: Callable[[timedelta | None], None], limit: timedelta | None) -> None:
        """As :meth:`wait_for`, of a round."""
        try:
            wait(limit)
        except _Missing as error:
            raise Unreached(f"{self._who_is_missing(error.rank)} ({error}){self._own_leaving()}") from error
        except RuntimeError as error:
            own = error.__traceback__
            deeper = own.tb_next.tb_next if own is not None and own.tb_next is not None else None
            if deeper is not None:
                raise
            self._raise_unreached(error)

    def _raise_unreached(self, error: RuntimeError) -> NoReturn:
        if not _OF_CONNECTIONS.search(str(error)):
            raise error  # this rank's own: a number or a size that gloo does not take
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise Unreached(f"{self._who_is_missing()} ({reason}){self._own_leaving()}") from error

    def notices(self, ranks: Sequence[int]) -> dict[int, str]:
        """Reasons of those ranks that have left since the group met last, by rank."""
        return notices.read(ranks, self._name, self.number)

    def _who_is_missing(self, missing: int | None = None) -> str:
        others = [rank for rank in self._ranks if rank != dist.get_rank()]
        others = others if missing is None else [missing]
        known = self.notices(others)
        if known:
            return "; ".join(f"rank {rank} {what}" for rank, what in known.items())
        who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(map(str, others))}"
        return f"{who} did not come: it ended, or waits in another collective, or is later than the group's timeout"

    def _own_leaving(self) -> str:
        """By what this rank itself has left since the group met last, which is why others may not come."""
        left = notices.own(self._name, self.number)
        return f". This rank {left} before, and where one rank leaves a step, all must." if left else ""


def _numbers() -> dict[str, int]:
    return {each._name: each.number for meetings in _meetings.values() for each in meetings.values()}


notices.count_by(_numbers)


@functools.cache
def _wait_for_workers_at_exit() -> None:
    """Let gloo's worker threads come to rest before the interpreter ends; destroyed groups have them, too.

    After a collective its worker gives the tensors back, for which it needs the interpreter. One that asks for it
    while it ends makes the process abort ("terminate called without an active exception"). Nothing says when a worker
    is through, and sleeping lets it have the interpreter.
    """
    atexit.register(time.sleep, 0.1)
