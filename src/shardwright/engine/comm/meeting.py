"""Meetings of the ranks of a gloo group before each collective. They agree on the collective, or hear who has left.

A wrong pairing of collectives aborts the process or hangs, so the ranks exchange a record first. If they agree, every
rank begins the collective, even if a signal's handler raises in between. If an exception ends a step on one rank, this
rank sends a record of its failure to the next meeting and does not wait. So the collectives of the group stay in order.
``rounds.py`` exchanges the records.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import operator
import re
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from shardwright.engine.comm import notices
from shardwright.engine.comm.hall import Missing, packed, unpacked
from shardwright.engine.comm.rounds import LEFT, ByGloo, Round, Way
from shardwright.engine.comm.shared_memory import SharedMemoryCollectives
from shardwright.engine.heartbeat import ranks_in_words

_FAILURE = 2  #: index of the failure's number in such a record
#: Words of gloo's errors if another rank does not come, or its connection has ended.
_OF_CONNECTIONS = re.compile(r"gloo/|time|connection|closed|reset|peer", re.IGNORECASE)

T = TypeVar("T")
_call: Callable[[Any], Any] = operator.call
#: One for each group and device, until the group ends. All ranks come to it in one order, for all callers.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Meeting]] = (
    weakref.WeakKeyDictionary()
)
#: Failures that this rank knows, the newest last. It ignores further records of them.
_known_failures: deque[int] = deque(maxlen=64)
_failures = itertools.count(1)


class Unreached(RuntimeError):
    """Another rank has not come. The message names it and the reason, if these are known."""


class Begun:
    """A collective that the ranks have agreed on. It stays in ``Meeting.begun`` until somebody has waited for it."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self.works: list[Any] = []

    def _waits(self) -> list[Any]:
        """Works to wait for, among those that the exchange returned when it began."""
        return [work for work in self.works if hasattr(work, "wait")]

    def wait(self) -> None:
        for work in self._waits():
            try:
                self._meeting.wait_for(work)
            except Unreached as error:
                text = f"Rank {dist.get_rank()} waits for the end of a collective, and {error}"
                raise Unreached(text) from error.__cause__
        self._meeting.begun.discard(self)

    def settle(self) -> None:
        """Wait until nothing writes to its memory."""
        for work in self._waits():
            if getattr(work, "in_background", True):
                self._meeting.wait_for(work)

    def is_completed(self) -> bool:
        return all(getattr(work, "is_completed", bool)() for work in self._waits())


def meeting_of(group: dist.ProcessGroup, device: torch.device) -> Meeting:
    """The meeting of a group's ranks."""
    meetings = _meetings.setdefault(group, {})
    if device not in meetings:
        meetings[device] = Meeting(group, device)
    return meetings[device]


def new_failure() -> int:
    """A number for a failure of this rank. No other failure of any rank has it."""
    failure = dist.get_rank() << 32 | next(_failures)
    _known_failures.append(failure)
    return failure


class _Promise:
    """A collective that this rank begins if the ranks agree in a round."""

    def __init__(self, begun: Begun, steps: Callable[[], Iterable[Callable[[], Any]]]) -> None:
        self.round: Round | None = None  #: None: this rank has not sent its record
        self.begun = begun
        self.calls: list[Any] = []  #: not empty after the collective has begun
        self._steps = steps

    def keep(self) -> None:
        """Begin the collective."""
        steps = functools.partial(self.calls.append, True), *self._steps()
        # No Python code runs between the steps. So a collective that is not in Python has begun if the first step was
        # called.
        self.begun.works.extend(map(_call, steps))


class Meeting:
    """The meetings of one group's ranks. See :func:`meeting_of`.

    A rank may report one failure more often than the others come, so each failure has a number. A rank that knows the
    failure ignores further records of it, and sends its own record again.

    Attributes:
        number: how often the ranks have met and agreed.
        agreement: when they agreed last: the number of the round; whether a rank had a dispatch mode around it, or they
            met by gloo.
        begun: collectives that nobody has waited for yet.
        failure: the failure because of which the ranks did not agree in the last meeting.
        failures: number of failures that this rank has received or sent here; equal on all ranks.
        left_by: the failure with which this rank has left since it last entered a model.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._name = group.group_name
        self._ranks = dist.get_process_group_ranks(group)
        self._way = Way(group, device)
        self._round: Round | None = None  #: the running round, or the last one if the ranks did not agree
        self._refused: Round | None = None  #: the last round in which the ranks did not agree
        self._agreed: Round | None = None  #: the last round in which they did
        self._promise: _Promise | None = None
        self.number = 0
        self.agreement = 0, True
        self._next = 0  #: ``number`` after they agree
        self.begun: set[Begun] = set()
        self.failure = self.left_by = self.failures = 0
        self._disagreements = 0
        _wait_for_workers_at_exit()
        notices.post_at_exit()

    def show(self, record: Sequence[int], limit: timedelta | None = None) -> list[list[int]] | None:
        """Send ``record`` (at most RECORD integers) to every rank. Returns the records of all ranks if they differ.

        Waits for the other ranks, at most for ``limit`` (default: the group's timeout). Modes that count collectives
        do not see it.

        Raises:
            Unreached: another rank does not come.
        """
        if self._round is not None:
            self._leave_round(limit)
        while self._way.unshown:
            leaving = self._way.new_round(self._way.unshown[0])
            self._wait_for(leaving.make_room, limit)
            leaving.begin()
            del self._way.unshown[0]
        self._next = self.number + 1
        mine = packed(record)
        promise = self._promise if self._promise is not None and self._promise.round is None else None
        while True:
            current = self._way.new_round(mine)
            self._wait_for(current.make_room, limit)
            self._round = current
            if promise is not None:
                promise.round = current
            current.begin()
            self._wait_for(current.wait, limit)
            records = current.records()
            self._way.learn(current)
            if all(each == mine for each in records):
                self._note_agreement(current)
                return None
            if self._refuses(current, records):
                return [unpacked(each) for each in records]

    def _note_agreement(self, current: Round) -> None:
        self.number = self._next
        self.agreement = current.number, current.is_watched()
        self._agreed, self._round = current, None

    def _leave_round(self, limit: timedelta | None) -> None:
        """End the last round, which was interrupted, or in which the ranks did not agree.

        With gloo, wait for it: its memory is used again, and its records may say that later rounds use pages.
        """
        current = self._round
        if isinstance(current, ByGloo) and current.begun:
            self._wait_for(current.wait, limit)
            self._way.learn(current)
        self._round = None

    def enter(self) -> None:
        """Begin a forward or backward: forget how this rank has left, and a round in which the ranks did not agree."""
        self.left_by = 0
        if self._refused is not None and self._refused is self._round:
            self._leave_round(None)

    def _refuses(self, current: Round, records: list[bytes]) -> bool:
        """Note the failure because of which the ranks do not agree in a round. Returns False if this rank knows it.

        If no rank has failed, it is a failure of all ranks, with one number on all of them.
        """
        failures = {row[_FAILURE] for row in map(unpacked, records) if row[0] == LEFT}
        if failures and failures.issubset(_known_failures):
            return False
        count = self._disagreements + 1
        name = f"{self._name} {self.number} {count}"
        failure = min(failures, default=1 << 62 | zlib.crc32(name.encode()))
        _known_failures.extend(failures or [failure])
        # Nothing can raise between these, so a round is noted once.
        self._refused, self._disagreements, self.failures, self.failure = (
            current,
            count,
            self.failures + 1,
            failure,
        )
        return True

    def shared_memory(self) -> SharedMemoryCollectives | None:
        """The collectives through shared memory, once all ranks have opened each other's pages; the same on every rank.

        Raises:
            Unreached: a round by gloo was interrupted, and another rank does not come to it.
        """
        if isinstance(self._round, ByGloo):
            self._leave_round(None)  # its records may say that the ranks use pages from now on
        return self._way.shared_memory

    def begin(self, announce: Callable[[], None], steps: Callable[[], Iterable[Callable[[], Any]]]) -> Begun:
        """Call ``announce``, which sends a record here, then each call that ``steps`` returns.

        The last one returns a work or None. ``steps`` may be called more than once. After the ranks have agreed, all
        begin the collective. If a signal's handler raises on this rank, it does so later.
        """
        self.begun -= {each for each in self.begun if each.is_completed()}
        promise = self._promise = _Promise(Begun(self), steps)
        try:
            announce()
            self.begun.add(promise.begun)
            promise.keep()
        except BaseException:
            if not promise.calls and self.agreed() and promise.calls:
                with suppress(Exception):
                    promise.begun.settle()
            if promise.round is not self._round or self._round in (None, self._refused):
                self._promise = None  # it has begun, or it never does
            raise
        self._promise = None
        return promise.begun

    def agreed(self, limit: timedelta | None = None) -> bool:
        """Whether the ranks agreed in the last meeting. If that was interrupted, wait for its end."""
        current = self._round
        if current is not None and current.begun:
            try:
                self._wait_for(current.wait, limit)
                records = current.records()
            except Exception:
                return False
            self._way.learn(current)
            if all(each == records[0] for each in records):
                self._note_agreement(current)
            elif current is self._refused or self._refuses(current, records):
                return (
                    False  # an exception may have come before the failure was noted: the others have noted it
                )
        self._round = None
        promise = self._promise
        if (
            promise is not None
            and promise.round is not None
            and promise.round is self._agreed
            and not promise.calls
        ):
            self.begun.add(promise.begun)
            with suppress(Exception):
                promise.keep()
        return True

    def reached(self, begin: Callable[[], T]) -> T:
        """Prepare a collective.

        Raises:
            Unreached: another rank has not come for earlier ones.
        """
        try:
            return begin()
        except Missing as error:
            self._raise_missing(error, closes=True)

    def disagreed(self) -> bool:
        """Whether all ranks came to the last meeting, with different records."""
        current = self._round
        return current is not None and current.begun and current.is_over() and not self.agreed()

    def settle(self) -> None:
        """Wait for collectives that have begun and may be forgotten, before their memory is used again."""
        for begun in list(self.begun):
            with suppress(Exception):
                begun.settle()
            self.begun.discard(begun)

    def leave(self, failure: int, record: Sequence[int]) -> None:
        """Report that this rank has left, in the next meeting, without waiting for it. Once for each failure.

        Args:
            failure: the number of the failure.
            record: the rest of the record, after the failure's number.
        """
        self._promise = None
        if self.left_by == failure:
            return
        self.left_by = failure
        self.failures += 1
        self._way.leave(packed([LEFT, 0, failure, *record]))

    def wait_for(self, work: Any) -> None:
        """Wait for a collective of the group. An exception of a signal's handler is raised unchanged."""
        try:
            work.wait()
        except Missing as error:
            self._raise_missing(error, closes=True)
        except RuntimeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            self._raise_unreached(error)

    def _wait_for(self, wait: Callable[[timedelta | None], None], limit: timedelta | None) -> None:
        """As :meth:`wait_for`, for a round."""
        try:
            wait(limit)
        except Missing as error:
            self._raise_missing(error, closes=limit is None)
        except RuntimeError as error:
            own = error.__traceback__
            deeper = own.tb_next.tb_next if own is not None and own.tb_next is not None else None
            if deeper is not None:
                raise
            self._raise_unreached(error)

    def _raise_missing(self, error: Missing, closes: bool) -> NoReturn:
        if error.late and closes:
            error.late = False  # once
            self._way.close(error.rank)
        raise Unreached(f"{self._who_is_missing(error.rank)} ({error}){self._own_leaving()}") from error

    def _raise_unreached(self, error: RuntimeError) -> NoReturn:
        if not _OF_CONNECTIONS.search(str(error)):
            raise error  # this rank's own error: a number or a size that gloo does not accept
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise Unreached(f"{self._who_is_missing()} ({reason}){self._own_leaving()}") from error

    def notices(self, ranks: Sequence[int]) -> dict[int, str]:
        """The reasons of ranks that have left since the last meeting of the group, by rank."""
        return notices.read(ranks, self._name, self.number)

    def _who_is_missing(self, missing: int | None = None) -> str:
        others = [rank for rank in self._ranks if rank != dist.get_rank()]
        others = others if missing is None else [missing]
        known = self.notices(others)
        if known:
            return "; ".join(f"rank {rank} {what}" for rank, what in known.items())
        who = f"{'one of ' * (len(others) > 1)}{ranks_in_words(others)}"
        return f"{who} did not come: it has ended, waits in another collective, or is later than the group's timeout"

    def _own_leaving(self) -> str:
        """The exception with which this rank has left since the last meeting. It may be why others do not come."""
        left = notices.own(self._name, self.number)
        return (
            f". This rank {left} before. If one rank leaves a step, all ranks must leave it." if left else ""
        )


def _numbers() -> dict[str, int]:
    return {each._name: each.number for meetings in _meetings.values() for each in meetings.values()}


notices.count_by(_numbers)


@functools.cache
def _wait_for_workers_at_exit() -> None:
    """Let gloo's worker threads finish before the interpreter ends. Destroyed groups have such threads, too.

    After a collective a worker releases its tensors, for which it needs the interpreter. If the interpreter is ending
    then, the process aborts ("terminate called without an active exception"). Nothing reports when a worker has
    finished, so this function sleeps; meanwhile workers can use the interpreter.
    """
    atexit.register(time.sleep, 0.1)
