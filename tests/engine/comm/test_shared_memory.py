"""Collectives as copies through shared memory: their results, what keeps segments apart, and ranks that do not come."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.engine.comm import Communicator, Division, Pending, Unreached, pages, shared_memory
from shardwright.engine.comm.pages import POSTS
from shardwright.engine.comm.shared_memory import Exchange, SharedMemoryCollectives
from tests.engine.kit.meetings import Interrupt, fresh_meetings
from tests.support import multirank

CPU = torch.device("cpu")

pytestmark = pytest.mark.central("a rank between others, with parts that differ in size", ranks=3)


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """A communicator whose ranks have found each other's pages."""
    comm = Communicator(group or dist.group.WORLD, CPU)
    for _ in range(3):
        assert comm.exchange((1,)) is None
    return comm


def shared_by(comm: Communicator) -> SharedMemoryCollectives | None:
    """The collectives through shared memory; None: the ranks use gloo."""
    return None if comm.meeting is None else comm.meeting.shared_memory()


def ready() -> tuple[Communicator, SharedMemoryCollectives]:
    comm = communicator()
    shared = shared_by(comm)
    assert shared is not None
    return comm, shared


def announced(comm: Communicator) -> Callable[[], None]:
    def announce() -> None:
        assert comm.exchange((5,)) is None

    return announce


def data(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank * 1000 + numel)).mul(8).to(dtype)


DIVISIONS = [Division(), Division(average=True), Division(before=2.0, after=1.5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


@multirank(2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(12,), (0, 24), (5000, 1, 77)], ids=str)
def test_results_are_those_of_gloo(
    rank: int, world_size: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Bit for bit, but for gloo's all-reduce over more than two ranks, which sums in another order."""
    results = []
    for way in ("gloo", "pages"):
        with fresh_meetings(way):
            comm = communicator()
            assert (shared_by(comm) is not None) is (way == "pages")
            announce = announced(comm)
            made = []
            bits = [data(rank, size, torch.float32).view(torch.uint8) for size in sizes]
            gathered = [torch.empty(world_size * t.numel(), dtype=torch.uint8) for t in bits]
            comm.all_gather(gathered, bits, announce=announce).wait()
            made += gathered
            for division in DIVISIONS:
                inputs = [data(rank, world_size * size, dtype) for size in sizes]
                outputs = [torch.full((size,), torch.nan, dtype=dtype) for size in sizes]
                comm.reduce_scatter(outputs, inputs, division, announce).wait()
                made += outputs
                value = data(rank, sum(sizes), dtype)
                if way == "gloo" and (world_size > 2 or dtype.is_complex):
                    rows = [data(each, sum(sizes), dtype).div(division.before) for each in range(world_size)]
                    value = torch.stack(rows)
                    value = value.mean(0) if division.average else value.sum(0).div_(division.after)
                else:
                    comm.all_reduce(value, division, announce).wait()
                made.append(value)
            results.append(made)
    for ours, gloos in zip(results[1], results[0], strict=True):
        assert torch.equal(ours, gloos), (ours, gloos)


@multirank(3)
def test_a_segment_is_used_again_once_all_ranks_have_read_it(rank: int, world_size: int) -> None:
    """Rank 2 begins eight gathers and reads none of them until the others are done."""
    with fresh_meetings():
        comm, _ = ready()
        announce = announced(comm)
        page = pages._own
        assert page is not None
        pending: list[tuple[Pending, torch.Tensor]] = []
        for number in range(8):
            mine = torch.full((10_000,), 10 * number + rank, dtype=torch.uint8)
            everyone = torch.empty(30_000, dtype=torch.uint8)
            pending.append((comm.all_gather([everyone], [mine], announce=announce), everyone))
            mine.zero_()  # it is free as soon as the gather has begun
            if rank != 2:
                pending[-1][0].wait()
        for each, _ in pending:
            each.wait()
        for number, (_, everyone) in enumerate(pending):
            assert everyone.view(3, -1).tolist() == [[10 * number + i] * 10_000 for i in range(3)]
        dist.barrier()
        end = page._data_end
        for _ in range(50):
            comm.all_gather([everyone], [mine], announce=announce).wait()
        assert page._data_end == end


@multirank(2)
def test_as_many_as_anyone_begins_without_a_wait(rank: int, world_size: int) -> None:
    with fresh_meetings():
        comm, _ = ready()
        announce = announced(comm)
        pending: list[tuple[Pending, torch.Tensor]] = []
        for number in range(2 * POSTS + 3):
            mine = torch.tensor([number % 256, rank], dtype=torch.uint8)
            everyone = torch.empty(4, dtype=torch.uint8)
            pending.append((comm.all_gather([everyone], [mine], announce=announce), everyone))
        for number, (each, everyone) in reversed(list(enumerate(pending))):
            each.wait()
            assert everyone.tolist() == [number % 256, 0, number % 256, 1]


@multirank(2)
def test_what_nobody_waits_for_frees_its_segment(rank: int, world_size: int) -> None:
    """A model that goes while a gather is under way."""
    with fresh_meetings():
        comm, made = ready()
        announce = announced(comm)
        everyone, mine = torch.zeros(8, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
        for _ in range(20):
            comm.all_gather([everyone], [mine], announce=announce)
        dist.barrier()
        comm.all_gather(
            [everyone], [mine], announce=announce
        ).wait()  # those that are over are forgotten here
        gc.collect()
        dist.barrier()
        assert not made.unread
        assert [ring.marked for _, ring in made.posts.others()] == [21]


@multirank(2)
def test_one_that_never_began_leaves_its_number_to_the_next(rank: int, world_size: int) -> None:
    with fresh_meetings():
        comm, made = ready()
        everyone, mine = torch.zeros(2, dtype=torch.uint8), torch.full((1,), rank, dtype=torch.uint8)
        abandoned = made.gather([everyone], [mine])
        assert abandoned.number == made.posts.mine.last + 1
        pending = comm.all_gather([everyone], [mine], announce=announced(comm))
        before = made.posts.mine.last
        del abandoned
        assert list(made.unread) == [before]
        pending.wait()
        assert everyone.tolist() == [0, 1] and not made.unread


@multirank(2)
@pytest.mark.parametrize("with_collective", [(1,), (0, 1)])
def test_a_collective_that_the_ranks_refused_never_begins(
    rank: int, world_size: int, with_collective: tuple[int, ...]
) -> None:
    """Later they agree on a record without a collective, and ask whether they did."""
    with fresh_meetings():
        comm, made = ready()
        assert comm.meeting is not None
        everyone, mine = torch.zeros(2, dtype=torch.uint8), torch.full((1,), rank, dtype=torch.uint8)

        def refused() -> None:
            if comm.exchange((5, rank)) is not None:
                raise ValueError

        with pytest.raises(ValueError):
            if rank in with_collective:
                comm.all_gather([everyone], [mine], announce=refused)
            else:
                refused()
        before = made.posts.mine.last
        assert comm.exchange((6,)) is None
        assert comm.meeting.agreed() and made.posts.mine.last == before
        comm.all_gather([everyone], [mine], announce=announced(comm)).wait()
        assert everyone.tolist() == [0, 1]


@multirank(2)
def test_interrupts_at_any_time_leave_the_ranks_together(rank: int, world_size: int) -> None:
    """In the beginning of a collective or in its wait, which is repeated."""
    with fresh_meetings():
        comm, made = ready()
        announce = announced(comm)
        inputs = torch.ones(400_000)
        output = torch.empty(200_000)
        interrupted = 0
        end = pages._own._data_end  # type: ignore[union-attr]
        for number in range(200):
            output.zero_()
            before = made.posts.mine.last
            while made.posts.mine.last == before:
                try:
                    with interrupt_after(2e-5 * (1 + (number + interrupted) % 60) if rank else 3600):
                        comm.reduce_scatter([output], [inputs], Division(), announce).wait()
                        assert output.min() == output.max() == 2
                except Interrupt:
                    interrupted += 1
                    assert comm.meeting is not None and comm.meeting.agreed()
                    comm.meeting.settle()
        assert interrupted > 10 or rank == 0
        comm.reduce_scatter([output], [inputs], Division(), announce).wait()
        assert output.min() == output.max() == 2
        gc.collect()
        assert not made.unread
        assert pages._own._data_end < end + 8 * inputs.nbytes  # type: ignore[union-attr]
        dist.barrier()


@multirank(2)
def test_settling_writes_to_no_memory(rank: int, world_size: int) -> None:
    """The memory of a forgotten collective may have another use by then. One that is waited for later is whole."""
    with fresh_meetings():
        comm, made = ready()
        announce = announced(comm)
        memory, mine = torch.zeros(8, dtype=torch.uint8), torch.full((4,), rank, dtype=torch.uint8)
        comm.all_gather([memory], [mine], announce=announce)
        other = torch.zeros(8, dtype=torch.uint8)
        pending = comm.all_gather([other], [mine], announce=announce)
        memory.fill_(77)
        assert comm.meeting is not None
        comm.meeting.settle()
        assert memory.tolist() == [77] * 8
        pending.wait()
        assert other.tolist() == [0] * 4 + [1] * 4
        assert not made.unread


@multirank(2)
def test_an_interrupt_while_one_is_forgotten_keeps_no_segment(rank: int, world_size: int) -> None:
    """Python drops what ``__del__`` raises."""
    with fresh_meetings(), pytest.MonkeyPatch.context() as patch:
        comm, made = ready()
        announce = announced(comm)
        memory, mine = torch.zeros(8, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
        comm.all_gather([memory], [mine], announce=announce)
        with patch.context() as inner:
            inner.setattr(Exchange, "__del__", lambda self: None)
            comm.exchange((6,))
            assert comm.meeting is not None
            comm.meeting.begun.clear()
            gc.collect()
        assert [each() for each in made.unread.values()] == [None]
        comm.all_gather([memory], [mine], announce=announce).wait()
        assert not made.unread and made.posts.mine.marked == 2
        dist.barrier()


@multirank(2)
def test_a_forked_process_leaves_its_parents_page_alone(rank: int, world_size: int) -> None:
    """As a worker of a DataLoader that collects a model of its parent's."""
    with fresh_meetings():
        comm, made = ready()
        memory, mine = torch.zeros(8, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
        pending = comm.all_gather([memory], [mine], announce=announced(comm))
        process = os.fork()
        if not process:
            assert comm.meeting is not None
            comm.meeting.begun.clear()
            del pending
            gc.collect()
            os._exit(0)
        os.waitpid(process, 0)
        assert list(made.unread) == [1] and made.posts.mine.marked == 0
        pending.wait()
        assert memory.tolist() == [1] * 8
        dist.barrier()


@multirank(2)
def test_what_was_announced_in_vain_begins_never(rank: int, world_size: int) -> None:
    """One rank's announcement raises before the ranks meet. A later meeting has the number of that one."""
    with fresh_meetings():
        comm, made = ready()
        assert comm.meeting is not None
        memory, mine = torch.zeros(8, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)

        def fails() -> None:
            raise ValueError("bad")

        if rank == 0:
            with pytest.raises(ValueError, match="bad"):
                comm.all_gather([memory], [mine], announce=fails)
        assert comm.exchange((9,)) is None
        assert comm.meeting.agreed()
        assert made.posts.mine.last == 0
        dist.barrier()


@multirank(2)
def test_an_unfinished_round_by_gloo_may_be_the_last_one(rank: int, world_size: int) -> None:
    """A rank that did not see its end chooses as the others do."""
    with fresh_meetings():
        comm = Communicator(dist.group.WORLD, CPU)
        assert comm.exchange((1,)) is None
        if rank == 0:
            with pytest.raises(Unreached):
                comm.exchange((2,), timedelta(seconds=0.2))
        else:
            time.sleep(0.6)
            assert comm.exchange((2,)) is None
        memory, mine = torch.zeros(8, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
        comm.all_gather([memory], [mine], announce=announced(comm)).wait()
        assert memory.tolist() == [1] * 8 and shared_by(comm) is not None
        dist.barrier()


@multirank(2)
def test_tensors_that_do_not_fit_are_an_error(rank: int, world_size: int) -> None:
    with fresh_meetings():
        comm, _ = ready()
        mine = torch.ones(4, dtype=torch.uint8)
        for wrong in (torch.zeros(7, dtype=torch.uint8), torch.zeros(8, 2, dtype=torch.uint8)[:, 0]):
            with pytest.raises(ValueError, match="contiguous"):
                comm.all_gather([wrong], [mine], announce=announced(comm))
        dist.barrier()


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    def handler(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@multirank(2)
def test_a_rank_that_comes_after_the_timeout_gets_an_error_at_once(rank: int, world_size: int) -> None:
    """And so does every later collective of the group, on both."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    with fresh_meetings():
        comm = communicator(group)
        everyone, mine = torch.zeros(2, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
        if rank == 1:
            time.sleep(1.5)
        began = time.monotonic()
        with pytest.raises(Unreached, match=r"rank \d did not come"):
            comm.all_gather([everyone], [mine], announce=announced(comm)).wait()
        assert time.monotonic() - began < (0.3 if rank else 1)
        dist.barrier()
        with pytest.raises(Unreached, match="waited for the group's timeout"):
            comm.all_gather([everyone], [mine])
        dist.barrier()


@multirank(2)
def test_ranks_at_different_collectives_get_an_error(rank: int, world_size: int) -> None:
    """Not each other's bytes. Here one rank began a collective on which the ranks had not agreed."""
    with fresh_meetings():
        comm, _ = ready()
        everyone, mine = torch.zeros(8, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
        if rank == 1:
            comm.all_gather([everyone], [mine])
        pending = comm.all_gather([everyone], [mine], announce=announced(comm))
        if rank == 0:
            with pytest.raises(
                RuntimeError, match=r"not the same on rank 1.*has 4 bytes and follows exchange 1,.*Make the"
            ):
                pending.wait()
        dist.barrier()


@multirank(2)
def test_a_full_page_is_an_error_before_the_ranks_agree(rank: int, world_size: int) -> None:
    with fresh_meetings(), pytest.MonkeyPatch.context() as patch:
        comm, _ = ready()
        page = pages._own
        assert page is not None
        patch.setattr(page, "_data_end", len(page.memory) - 1000)
        patch.setattr(shared_memory, "_segments_of", shared_memory._Segments)
        everyone, mine = torch.zeros(1 << 28, dtype=torch.uint8), torch.zeros(1 << 27, dtype=torch.uint8)
        met = comm.meeting.number  # type: ignore[union-attr]
        with pytest.raises(MemoryError, match="SHARDWRIGHT_CPU_COLLECTIVES=gloo"):
            comm.all_gather([everyone], [mine], announce=announced(comm))
        assert comm.meeting.number == met  # type: ignore[union-attr]
        dist.barrier()


@multirank(2)
def test_a_rank_whose_page_has_no_room_for_data_keeps_all_on_gloo(rank: int, world_size: int) -> None:
    """As under ``ulimit -v``. Their meetings go by pages."""
    with fresh_meetings(), pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(pages, "_SIZES", pages._SIZES[1:])
            patch.setattr(pages, "_own", None)
        comm = communicator()
        assert shared_by(comm) is None and comm.meeting is not None and comm.meeting._way.hall is not None
        value = torch.ones(3)
        comm.all_reduce(value, Division(), announced(comm)).wait()
        assert value.tolist() == [2, 2, 2]
        dist.barrier()


def test_sizes_of_segments_waste_a_quarter_at_most() -> None:
    for nbytes in (1, 4096, 4097, 100_000, 1_000_001, 123_456_789):
        assert nbytes <= shared_memory._rounded(nbytes) <= max(4096, 1.25 * nbytes + 4096)
        assert shared_memory._rounded(nbytes) % 4096 == 0


@multirank(2)
def test_nothing_of_it_has_a_name(rank: int, world_size: int) -> None:
    """So nothing stays behind, however the processes end."""
    shared = Path("/dev/shm")
    before = set(shared.iterdir())
    with fresh_meetings():
        comm, _ = ready()
        big = torch.ones(1_000_000)
        comm.all_reduce(big, Division(), announced(comm)).wait()
        assert big[0] == 2
        ours = {path for path in shared.iterdir() if path.owner() and path.stat().st_uid == os.getuid()}
        assert not {path for path in ours - before if "shardwright" in path.name}
    dist.barrier()


@multirank(2)
def test_two_threads_use_groups_of_their_own(rank: int, world_size: int) -> None:
    """They take segments from one page."""
    with fresh_meetings():
        comms = [communicator(dist.new_group()) for _ in range(2)]
        wrong: list[str] = []

        def work(number: int) -> None:
            comm, announce = comms[number], announced(comms[number])
            for turn in range(300):
                value = torch.full((5000,), float(turn + number))
                comm.all_reduce(value, Division(), announce).wait()
                if not bool((value == 2 * (turn + number)).all()):
                    wrong.append(f"thread {number}, turn {turn}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[:3]
    dist.barrier()


DIES = """
import os, signal, sys
import torch, torch.distributed as dist
from shardwright.engine.comm import Communicator, Division, Unreached
rank = int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=3, init_method="file://" + sys.argv[2])
comm = Communicator(dist.group.WORLD, torch.device("cpu"))
for number in range(20):
    def announce():
        comm.exchange((number,))
        if rank == 1 and number == 12 and sys.argv[3] == "agreed":
            os.kill(os.getpid(), signal.SIGKILL)
    value = torch.ones(1000)
    try:
        pending = comm.all_reduce(value, Division(), announce)
        if rank == 1 and number == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        pending.wait()
    except Unreached as error:
        print(number, error, flush=True)
        os._exit(3)
    assert value[0] == 3
    assert number < 2 or (comm.meeting is not None and comm.meeting.shared_memory() is not None)
"""


@pytest.mark.extensive("each moment kills a process")
@pytest.mark.parametrize("when", ["agreed", "begun"])
def test_a_rank_that_is_killed_is_named_at_once(when: str, tmp_path: Path) -> None:
    """After the ranks have agreed on a collective, before and after it has begun. What it has posted is still read."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DIES, str(rank), str(tmp_path / "store"), when],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    began = time.monotonic()
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert time.monotonic() - began < 45
    assert ranks[1].returncode == -9
    for rank in (0, 2):
        out, errors = outputs[rank]
        assert ranks[rank].returncode == 3, errors
        number, text = out.split(" ", 1)
        assert number == ("12" if when == "agreed" else "13")
        assert "rank 1 did not come" in text and "its process has ended" in text
