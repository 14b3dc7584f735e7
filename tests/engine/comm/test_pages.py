"""Meetings on pages that the ranks of one host share: how they are found, and what happens where one ends."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, repeat

import pytest
import torch
import torch.distributed as dist

from shardwright.engine.comm import LEFT, Meeting, Unreached, new_failure, pages
from shardwright.engine.comm.hall import Hall, Missing
from shardwright.engine.comm.meeting import meeting_of
from shardwright.engine.comm.pages import SLOTS, OtherRing, Ring
from tests.engine.kit.meetings import Interrupt, fresh_meetings, goes_by_pages
from tests.support import multirank

CPU = torch.device("cpu")


def record(*words: int) -> bytes:
    return struct.pack("=6q", *words, *[0] * (6 - len(words)))


def ring() -> Ring:
    made = pages.new_ring()
    assert made is not None
    return made


@contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """Another process that does this and then sleeps until it is killed."""
    process = os.fork()
    if not process:
        try:
            work()
            time.sleep(60)
        finally:
            os._exit(1)
    try:
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@contextmanager
def ring_of_a_child(*records: bytes) -> Iterator[tuple[OtherRing, int]]:
    """The ring of another process with these records, and the process."""
    ours, theirs = os.pipe()

    def write() -> None:
        mine = ring()  # a page of the child's own
        for number, each in enumerate(records, 1):
            mine.write(number, each)
        os.write(theirs, struct.pack("=4q", *mine.address))

    with child(write) as process:
        os.close(theirs)
        address = pages.Address(*struct.unpack("=4q", os.read(ours, 32)))
        assert address.pid == process
        yield pages.other_ring(address), process
    os.close(ours)


def test_another_process_reads_what_was_written() -> None:
    with ring_of_a_child(record(1, 2, 3), record(-4)) as (theirs, _):
        assert theirs.wait(1) == record(1, 2, 3)
        assert theirs.wait(2) == record(-4)
        assert theirs.read(3) is None and not theirs.has_written(3)
        assert theirs.wait(3) is None
        assert theirs.is_alive()


def test_the_latest_records_are_there() -> None:
    with ring_of_a_child(*(record(i) for i in range(SLOTS + 2))) as (theirs, _):
        assert theirs.read(2) is None and theirs.has_written(2)
        assert theirs.read(3) == record(2) and theirs.read(SLOTS + 2) == record(SLOTS + 1)


def test_half_a_record_is_none() -> None:
    mine = ring()
    mine.write(1, record(5))
    start = pages._slot(mine.address.offset, 1, SLOTS)
    theirs = OtherRing(mine.page, mine.address.offset)  # type: ignore[arg-type]
    assert theirs.read(1) == record(5)
    mine.page.memory[start + 8] = 6
    assert theirs.read(1) is None


def test_the_memory_says_which_record_was_the_last() -> None:
    """An interrupt may come before this process notes it."""
    mine = ring()
    mine.write(1, record(5))
    mine._last = 0
    assert mine.last == 1


def test_a_process_that_ends_is_noticed() -> None:
    """Before anybody has waited for it, too. One that was stopped lives."""
    with ring_of_a_child(record(1)) as (theirs, process):
        os.kill(process, signal.SIGSTOP)
        assert theirs.wait(2) is None and theirs.is_alive()
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # it stays as a zombie
        assert theirs.wait(2) is None and not theirs.is_alive()
        assert theirs.read(1) == record(1)


def test_a_wait_ends_though_signals_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler's timer, say: each ends the sleep."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        with ring_of_a_child(record(1)) as (theirs, _):
            assert theirs.wait(2) is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_file_that_is_no_page_is_refused(tmp_path: os.PathLike[str]) -> None:
    file = os.open(os.path.join(tmp_path, "file"), os.O_RDWR | os.O_CREAT)
    other = os.memfd_create("shardwright")
    mine = ring().address
    for address in (
        pages.Address(os.getpid(), file, 1, 1024),
        pages.Address(os.getpid(), other, 1, 1024),
        pages.Address(os.getpid(), mine.file, mine.token + 1, 1024),
        pages.Address(1 << 22, 3, 1, 1024),
    ):
        with pytest.raises(OSError):
            pages.other_ring(address)
    os.close(file)
    os.close(other)


def test_looking_at_files_leaves_the_own_lock() -> None:
    """A rank of another host may have this one's numbers. A lock goes when its process closes any file of it."""
    mine = ring().address
    with pytest.raises(OSError):
        pages.other_ring(mine._replace(token=mine.token + 1))
    asked, answers = os.pipe()

    def look() -> None:
        os.write(answers, b"yes" if pages.other_ring(mine).is_alive() else b"no")

    with child(look):
        os.close(answers)
        assert os.read(asked, 8) == b"yes"
    os.close(asked)


def test_a_full_page_gives_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    page = pages.Page()
    monkeypatch.setattr(pages, "_own", page)
    page._end = pages._DATA - pages._ROOM
    assert pages.new_ring() is not None
    assert pages.new_ring() is None


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CPU_COLLECTIVES", "gloo")
    assert pages.new_ring() is None


# -- meetings --------------------------------------------------------------------------------------------------------


def world_meeting() -> Meeting:
    assert dist.group.WORLD is not None
    return meeting_of(dist.group.WORLD, CPU)


def own_meeting() -> Meeting:
    """The meeting of a new group, about whose ranks no test before has left a notice."""
    return meeting_of(dist.new_group(), CPU)


@multirank(2, 3)
def test_ranks_of_a_host_go_over_to_pages_together(rank: int, world_size: int) -> None:
    with fresh_meetings():
        meeting = world_meeting()
        ways = []
        for number in range(5):
            assert meeting.show((number,)) is None
            ways.append(goes_by_pages(meeting))
            rows = meeting.show((7, rank))  # they do not agree
            assert rows == [[7, each, 0, 0, 0, 0] for each in range(world_size)]
            ways.append(goes_by_pages(meeting))
        assert ways == [False] + [True] * 9
        assert meeting.number == 5
        assert meeting_of(dist.group.WORLD, CPU) is meeting  # type: ignore[arg-type]


@multirank(2, 3)
def test_one_rank_without_pages_keeps_all_on_gloo(rank: int, world_size: int) -> None:
    """As one on another host."""
    with fresh_meetings("gloo" if rank == 1 else "pages"):
        meeting = world_meeting()
        for number in range(4):
            assert meeting.show((number,)) is None
        assert not goes_by_pages(meeting)


@multirank(3)
def test_one_rank_that_finds_no_pages_keeps_all_on_gloo(rank: int, world_size: int) -> None:
    with fresh_meetings(), pytest.MonkeyPatch.context() as patch:
        if rank == 2:

            def nowhere(address: pages.Address) -> OtherRing:
                raise FileNotFoundError

            patch.setattr(pages, "other_ring", nowhere)
        meeting = world_meeting()
        for number in range(4):
            assert meeting.show((number,)) is None
        assert not goes_by_pages(meeting)


@multirank(2)
@pytest.mark.parametrize("leaves", [1, 3, SLOTS + 5])
@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_leaving_before_and_after_pages_are_found(
    rank: int, world_size: int, before: int, leaves: int
) -> None:
    """Rank 0 leaves by many failures, without waiting. Rank 1 sees the first, and both meet again."""
    with fresh_meetings():
        meeting = world_meeting()
        for number in range(before):
            assert meeting.show((number,)) is None
        if rank == 0:
            failures = [new_failure() for _ in range(leaves)]
            for failure in failures:
                assert meeting.agreed()
                meeting.leave(failure, (1,))
        seen = 0
        while (rows := meeting.show((9,))) is not None:
            assert rank == 1 and rows[0][0] == LEFT
            seen += 1
        # On pages those that find no room are not shown.
        assert min(leaves, SLOTS - 1) * rank <= seen <= leaves * rank
        for number in range(5):
            assert meeting.show((number,)) is None
        assert goes_by_pages(meeting)


def test_a_rank_that_reads_while_another_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks of the waiting rank."""
    looks = chain([False], repeat(True))
    other = OtherRing.__new__(OtherRing)
    monkeypatch.setattr(OtherRing, "has_written", lambda self, number: next(looks))
    Hall(ring(), [(0, None), (1, other)]).wait_for_room(SLOTS + 1, time.monotonic() + 60)


@multirank(2)
def test_a_rank_that_does_not_come_is_named(rank: int, world_size: int) -> None:
    """Until the limit, once; the next round is another one."""
    with fresh_meetings():
        meeting = own_meeting()
        for number in range(3):
            assert meeting.show((number,)) is None
        if rank == 0:
            with pytest.raises(Unreached, match=r"rank 1 did not come.*timed out"):
                meeting.show((4,), timedelta(seconds=0.3))
            assert not meeting.agreed()
        dist.barrier()
        if rank == 1:
            assert meeting.show((5,)) == [[4, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]]
        assert meeting.show((6,)) is None


@multirank(2)
def test_many_failures_of_one_rank_alone_end_each_by_its_limit(rank: int, world_size: int) -> None:
    """Also when its ring is full of records that nobody has read."""
    with fresh_meetings():
        meeting = own_meeting()
        for number in range(3):
            assert meeting.show((number,)) is None
        for _ in range(SLOTS + 3 if rank == 0 else 0):
            with pytest.raises(Unreached, match="rank 1 did not come"):
                meeting.show((4,), timedelta(seconds=0.05))
        dist.barrier()


@multirank(2)
def test_after_the_groups_timeout_a_late_rank_has_no_collective(rank: int, world_size: int) -> None:
    """The early rank's record is still there, so the late one believes that both are there."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    with fresh_meetings():
        meeting = meeting_of(group, CPU)
        for number in range(3):
            assert meeting.show((number,)) is None
        value = torch.ones(3)

        def collective() -> dist.Work | None:
            return dist.all_reduce(value, group=group, async_op=True)

        if rank == 1:
            time.sleep(1.5)
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            meeting.begin(lambda: agree(meeting, 4), lambda: (collective,)).wait()
        assert time.monotonic() - began < 1.5
        assert not meeting.agreed() or rank == 1
        dist.barrier()


def agree(meeting: Meeting, number: int) -> None:
    assert meeting.show((number,)) is None


def test_a_death_behind_a_slow_rank_is_noticed() -> None:
    with ring_of_a_child() as (slow, _), ring_of_a_child() as (dead, process):
        os.kill(process, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(Missing, match="ended") as caught:
            Hall(ring(), [(0, None), (1, slow), (2, dead)]).wait_for(1, record(1), began + 60)
        assert time.monotonic() - began < 5
        assert caught.value.rank == 2


@multirank(2)
@pytest.mark.parametrize("interrupts", [1, 2, 3])
def test_interrupts_while_a_rank_waits_do_not_keep_it_from_what_was_agreed_on(
    rank: int, world_size: int, interrupts: int
) -> None:
    with fresh_meetings():
        meeting = world_meeting()
        for number in range(3):
            assert meeting.show((number,)) is None
        value = torch.ones(3)

        def collective() -> dist.Work | None:
            return dist.all_reduce(value, async_op=True)

        if rank == 1:
            time.sleep(0.3 * interrupts + 0.5)
            meeting.begin(lambda: agree(meeting, 4), lambda: (collective,)).wait()
        else:
            interrupted = 0
            with interrupts_each(0.3):
                try:
                    meeting.begin(lambda: agree(meeting, 4), lambda: (collective,))
                except Interrupt:
                    interrupted = 1
                while interrupted < interrupts:  # a caller that cleans up, and is interrupted there, too
                    try:
                        meeting.agreed()
                    except Interrupt:
                        interrupted += 1
            meeting.settle()
            assert meeting.agreed()
            meeting.settle()
        assert value.tolist() == [2, 2, 2]
        dist.barrier()


@contextmanager
def interrupts_each(seconds: float) -> Iterator[None]:
    def handler(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@multirank(4)
def test_groups_within_the_world_have_rings_of_their_own(rank: int, world_size: int) -> None:
    with fresh_meetings():
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = meeting_of(pairs[rank // 2], CPU)
        world = world_meeting()
        for number in range(4):
            assert mine.show((rank // 2, number)) is None
            assert world.show((number,)) is None
            assert mine.show((rank,)) is not None
        assert goes_by_pages(mine) and goes_by_pages(world)
        assert mine._way.hall.mine.address.offset != world._way.hall.mine.address.offset
        for group in pairs:
            dist.destroy_process_group(group)
