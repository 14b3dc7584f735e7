"""How the ranks of a gloo group meet before each collective: what each is about to do, and who has left.

A wrong pairing of collectives aborts the process or hangs, so the ranks show each other a record first. What they have
agreed on is begun on every rank, even where a signal's handler raises in between. A rank that leaves by an exception
shows that where the others come next, and does not wait for them. So the collectives of the group stay in order.
By what they meet is in ``rounds.py``.
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

from shardwright.comm import notices
from shardwright.comm.copies import Copies
from shardwright.comm.hall import Missing, packed, unpacked
from shardwright.comm.rounds import LEFT, ByGloo, Round, Way

_FAILURE = 2  #: where such a record has the number of the failure
#: What gloo says where another rank does not come, or its connection has ended.
_OF_CONNECTIONS = re.compile(r"gloo/|time|connection|closed|reset|peer", re.IGNORECASE)

T = TypeVar("T")
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

    def _waits(self) -> list[Any]:
        """What there is to wait for, of what beginning it has returned."""
        return [work for work in self.works if hasattr(work, "wait")]

    def wait(self) -> None:
        for work in self._waits():
            try:
                self._meeting.wait_for(work)
            except Unreached as error:
                text = f"Rank {dist.get_rank()} waits for the end of a collective, and {error}"
                raise Unreached(text) from error.__cause__
        self._meeting.begun.discard(self)

    def is_over(self) -> bool:
        return all(getattr(work, "is_completed", bool)() for work in self._waits())


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


class _Promise:
    """A collective that this rank begins if the ranks agree in a round."""

    def __init__(self, number: int, begun: Begun, steps: Callable[[], Iterable[Callable[[], Any]]]) -> None:
        self.number = number  #: of the round
        self.begun = begun
        self.calls: list[Any] = []  #: not empty once the collective has begun
        self._steps = steps

    def keep(self) -> None:
        """Begin it."""
        steps = functools.partial(self.calls.append, True), *self._steps()
        # No Python runs between the steps, so a collective that is no Python has begun if the first was called.
        self.begun.works.extend(map(_call, steps))


class Meeting:
    """Where the ranks of one group meet. See :func:`meeting_of`.

    A rank may leave by one failure more often than the others come, so each failure has a number: a rank that knows the
    failure ignores further records of it, and shows its own record again.

    Attributes:
        number: how often they have met and agreed.
        agreement: when they agreed last: the number of the round; whether a rank had a dispatch mode around it, or they
            met by gloo.
        begun: collectives that nobody has waited for yet.
        failure: by which they did not agree when they met last.
        failures: how many this rank has heard of or shown here; the same number on every rank.
        left_by: the failure by which this rank has left since it last entered a model.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._name = group.group_name
        self._ranks = dist.get_process_group_ranks(group)
        self._way = Way(group, device)
        self._round: Round | None = None  #: that is under way, or where the ranks did not agree
        self._promise: _Promise | None = None
        self.number = 0
        self.agreement = 0, True
        self._next = 0  #: ``number`` once they agree
        self.begun: set[Begun] = set()
        self.failure = self.left_by = self.failures = 0
        self._disagreements = 0
        _wait_for_workers_at_exit()
        notices.post_at_exit()

    def show(self, record: Sequence[int], limit: timedelta | None = None) -> list[list[int]] | None:
        """Show every rank ``record`` (at most RECORD integers); return all ranks' if they are not the same.

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
        while True:
            current = self._way.new_round(mine)
            self._wait_for(current.make_room, limit)
            self._round = current
            current.begin()
            self._wait_for(current.wait, limit)
            records = current.records()
            self._way.learn(current)
            if all(each == mine for each in records):
                self.number = self._next
                self.agreement = current.number, current.is_watched()
                self._round = None
                return None
            rows = [unpacked(each) for each in records]
            failures = {row[_FAILURE] for row in rows if row[0] == LEFT}
            if not failures or not failures.issubset(_known_failures):
                self._note_failure(failures)
                return rows

    def _leave_round(self, limit: timedelta | None) -> None:
        """Before the next round: this one was interrupted, or the ranks did not agree there.

        By gloo, wait for it: its memory is used again, and its records may say that all ranks go over to pages.
        """
        current = self._round
        if isinstance(current, ByGloo) and current.begun:
            self._wait_for(current.wait, limit)
            self._way.learn(current)
        self._round = None

    def _note_failure(self, failures: set[int]) -> None:
        """They do not agree. Without a failure of one rank's it is one of all, and has one number on all of them."""
        self._disagreements += 1
        self.failures += 1
        name = f"{self._name} {self.number} {self._disagreements}"
        self.failure = min(failures, default=1 << 62 | zlib.crc32(name.encode()))
        _known_failures.extend(failures or [self.failure])

    @property
    def copies(self) -> Copies | None:
        """The collectives of ranks of one host, once all have found each other's pages; the same on every rank."""
        return self._way.copies

    def begin(self, announce: Callable[[], None], collective: Callable[[], Any]) -> Begun:
        """Call ``announce``, which shows a record here, then ``collective``, which returns a work or None.

        Once the ranks have agreed, all begin it: a signal's handler that raises on this one does so after that.
        """
        return self.begin_in_steps(announce, lambda: (collective,))

    def begin_in_steps(
        self, announce: Callable[[], None], steps: Callable[[], Iterable[Callable[[], Any]]]
    ) -> Begun:
        """:meth:`begin` with calls of which the last returns the work. ``steps`` makes them once the ranks agree.

        It may be called more than once.
        """
        self.begun -= {each for each in self.begun if each.is_over()}
        promise = self._promise = _Promise(self.number + 1, Begun(self), steps)
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
            self._way.learn(current)
            if any(each != records[0] for each in records):
                return False
            self.number = self._next
            self.agreement = current.number, current.is_watched()
        self._round = None
        promise = self._promise
        if promise is not None and promise.number == self.number and not promise.calls:
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
        self._way.leave(packed([LEFT, 0, failure, *record]))

    def wait_for(self, work: Any) -> None:
        """Wait for a collective of the group. What a signal's handler raises meanwhile is raised as it is."""
        try:
            work.wait()
        except Missing as error:
            self._raise_missing(error, closes=True)
        except RuntimeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            self._raise_unreached(error)

    def _wait_for(self, wait: Callable[[timedelta | None], None], limit: timedelta | None) -> None:
        """As :meth:`wait_for`, of a round."""
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
        return f"{who} did not come: it has ended, waits in another collective, or is later than the group's timeout"

    def _own_leaving(self) -> str:
        """By what this rank itself has left since the group met last, which is why others may not come."""
        left = notices.own(self._name, self.number)
        return (
            f". This rank {left} before. If one rank leaves a step, all ranks must leave it." if left else ""
        )


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
