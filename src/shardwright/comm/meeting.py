"""How the ranks of a gloo group meet before each collective: what each is about to do, and who has left.

A wrong pairing of collectives aborts the process or hangs, so the ranks show each other a record first. What they have
agreed on is begun on every rank, even where a signal's handler raises in between. A rank that leaves by an exception
shows that where the others come next, and does not wait for them. So the collectives of the group stay in order.

A group first meets by gloo. In those records ranks of one host find each other's pages (``pages.py``), and once all
have found all, they meet there, which takes a few microseconds. They go over in one round, after one whose records say
so; every rank has seen these.
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
from shardwright.comm.pages import NOWHERE, SLOTS, WORDS, Address, OtherRing, Ring

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
#: Failures that this rank knows of, the newest last. It ignores further records of them.
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


class _Promise:
    """A collective that this rank begins if the ranks agree in a round."""

    def __init__(self, number: int, begun: Begun, collective: Callable[[], Any]) -> None:
        self.number = number  #: of the round
        self.begun = begun
        self.calls: list[Any] = []  #: not empty once the collective has begun
        self._collective = collective

    def keep(self) -> None:
        """Begin it."""
        # No Python runs between the two, so a collective that is no Python has begun if the first was called.
        self.begun.works.extend(map(_call, (functools.partial(self.calls.append, True), self._collective)))


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

    def make_room(self, limit: timedelta | None) -> None:
        """Wait until :meth:`begin` can show the record."""

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

    def make_room(self, limit: timedelta | None) -> None:
        """There is."""

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


class _Missing(Exception):
    """A rank does not come."""

    def __init__(self, rank: int, reason: str, late: bool) -> None:
        super().__init__(reason)
        self.rank = rank
        self.late = late  #: whether its process lives


class _ByPages:
    """Records in memory that the ranks share."""

    def __init__(self, hall: _Hall, number: int, record: bytes, timeout: timedelta) -> None:
        self._hall = hall
        self._number = number
        self._record = record
        self._timeout = timeout
        self._records: list[bytes] = []
        self._missing: _Missing | None = None  #: who has not come when this was waited for

    @property
    def begun(self) -> bool:
        return self._hall.mine.last >= self._number

    def make_room(self, limit: timedelta | None) -> None:
        if not self._hall.has_room(self._number):
            self._hall.wait_for_room(self._number, self._until(limit))

    def begin(self) -> None:
        self._hall.mine.write(self._number, self._record)

    def _until(self, limit: timedelta | None) -> float:
        return time.monotonic() + (self._timeout if limit is None else limit).total_seconds()

    def wait(self, limit: timedelta | None) -> None:
        if self._missing is not None:  # as a collective of gloo's that has failed
            raise self._missing
        try:
            self._records = self._hall.wait_for(self._number, self._record, self._until(limit))
        except _Missing as error:
            self._missing = error
            raise

    def is_over(self) -> bool:
        return all(ring.read(self._number) is not None for _, ring in self._hall.others())

    def records(self) -> list[bytes]:
        return self._records


class _Hall(NamedTuple):
    """The rings of a group's ranks on one host."""

    mine: Ring
    rings: list[tuple[int, OtherRing | None]]  #: by rank; None: this rank's

    def others(self) -> list[tuple[int, OtherRing]]:
        return [(rank, ring) for rank, ring in self.rings if ring is not None]

    def wait_for(self, number: int, record: bytes, until: float) -> list[bytes]:
        """All ranks' records of this number; ``record`` is this rank's.

        Raises:
            _Missing: a process has ended, or ``until`` (of ``time.monotonic``) is over.
        """
        records: list[bytes] = []
        for rank, ring in self.rings:
            while True:
                came = record if ring is None else ring.wait(number)
                if came is not None:
                    records.append(came)
                    break
                self._check(number, until, rank)
        return records

    def _check(self, number: int, until: float, slow: int) -> None:
        """Raise if any rank cannot come any more, or if it is too late for the ``slow`` one."""
        for rank, ring in self.others():
            if not ring.has_written(number) and not ring.is_alive() and not ring.has_written(number):
                raise _Missing(rank, "its process has ended", late=False)
        if time.monotonic() > until:
            raise _Missing(slow, "timed out", late=True)

    def has_room(self, number: int) -> bool:
        """Whether all ranks have read the record in whose place that of this number is written."""
        read = number - SLOTS + 1
        return read <= 0 or all(ring is None or ring.has_written(read) for _, ring in self.rings)

    def wait_for_room(self, number: int, until: float) -> None:
        """After this rank has left many times. Raises as :meth:`wait_for`."""
        while not self.has_room(number):
            read = number - SLOTS + 1
            self._check(read, until, next(rank for rank, ring in self.others() if not ring.has_written(read)))
            time.sleep(pages.TICK / 10)


class Meeting:
    """Where the ranks of one group meet. See :func:`meeting_of`.

    A rank may leave by one failure more often than the others come, so each failure has a number: a rank that knows the
    failure ignores further records of it, and shows its own record again.

    Attributes:
        number: how often they have met and agreed.
        begun: collectives that nobody has waited for yet.
        failure: by which they did not agree when they met last.
        failures: how many this rank has heard of or shown here; the same number on every rank.
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
        self._unshown: list[bytes] = []  #: what there was no room for in leaving
        self._promise: _Promise | None = None
        self.number = 0
        self._next = 0  #: ``number`` once they agree
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
        while self._unshown:
            self._show_unshown(limit)
        self._next = self.number + 1
        mine = _packed(record)
        while True:
            current = self._new_round(mine)
            self._wait_for(current.make_room, limit)
            self._round = current
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

        By gloo, wait for it: its records may say that all ranks go over to pages.
        """
        current = self._round
        if self._ring is not None and isinstance(current, _ByGloo) and current.begun:
            self._wait_for(current.wait, limit)
            self._look_for_pages(current)
        self._round = None

    def _show_unshown(self, limit: timedelta | None) -> None:
        """Show the oldest; the others ignore it if they see it twice."""
        current = self._new_round(self._unshown[0])
        self._wait_for(current.make_room, limit)
        current.begin()
        del self._unshown[0]

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
        promise = self._promise = _Promise(self.number + 1, Begun(self), collective)
        try:
            announce()
            self.begun.add(promise.begun)
            promise.keep()
        except BaseException:
            if not promise.calls and self.agreed() and promise.calls:
                with suppress(Exception):
                    promise.begun.wait()
            raise
        self._promise = None
        return promise.begun

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
        promise = self._promise
        if promise is not None and promise.number == self.number and not promise.calls:
            self.begun.add(promise.begun)
            with suppress(Exception):
                promise.keep()
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
            if self._unshown or not hall.has_room(number):
                self._unshown.append(shown)  # the others have not come for many failures of this rank's
            else:
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
            closes, error.late = error.late and limit is None, False  # once
            if closes:
                self._close()
            raise Unreached(f"{self._who_is_missing(error.rank)} ({error}){self._own_leaving()}") from error
        except RuntimeError as error:
            own = error.__traceback__
            deeper = own.tb_next.tb_next if own is not None and own.tb_next is not None else None
            if deeper is not None:
                raise
            self._raise_unreached(error)

    def _close(self) -> None:
        """After the group's timeout, as gloo does: a rank that comes later has no collective with this one."""
        options = AllToAllOptions()
        options.timeout = timedelta(milliseconds=1)
        mine, theirs = _Records(len(self._ranks)), _Records(len(self._ranks))
        closing = _ByGloo(backend_for(self._group, self._device), mine, theirs, options)
        with suppress(RuntimeError):
            closing.begin()
            closing.wait(None)

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
