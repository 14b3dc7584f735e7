"""The worker pool's own promises: what passes passes, what fails, hangs or dies fails alone and says why."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import CaseFailed, CaseSkipped, WorkerPools, multirank, seed_all, world_mesh


@multirank(1, 2, 3, 4)
def test_ranks_share_one_group(rank: int, world_size: int) -> None:
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    assert dist.get_world_size() == world_size and dist.get_rank() == rank
    assert value.item() == sum(range(world_size))
    assert torch.get_num_threads() == 1


@multirank(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3), (1,)])
def test_parameters_reach_the_ranks(
    rank: int, world_size: int, dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    value = torch.full(shape, rank + 1, dtype=dtype)
    dist.all_reduce(value)
    assert value.dtype == dtype and tuple(value.shape) == shape
    assert value.flatten()[0] == sum(range(1, world_size + 1))
    (tmp_path / f"rank{rank}").touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world_size


class TestMethods:
    """Test classes work too, as long as the function needs no instance."""

    @staticmethod
    @multirank(2)
    def test_static_method(rank: int, world_size: int) -> None:
        assert world_mesh(2) is world_mesh(2)


def pids(rank: int, world_size: int) -> int:
    return os.getpid()


def draw(rank: int, world_size: int, own_seed: bool = False) -> float:
    if own_seed:
        seed_all(rank)
    return torch.rand(()).item()


def disturb(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank + 77)
    os.environ["DISTURBED"] = "1"
    os.chdir("/")


def read_state(rank: int, world_size: int) -> tuple[torch.dtype, int, bool, str]:
    return torch.get_default_dtype(), torch.initial_seed(), "DISTURBED" in os.environ, os.getcwd()


def fail_on_rank_1(rank: int, world_size: int) -> None:
    print(f"rank {rank} was here")
    secret_value = 40 + rank
    assert secret_value == 40


def fail_while_others_wait(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the true cause")
    dist.barrier()


def hang_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(1000)
    else:
        wait_for_rank_0()


def wait_for_rank_0() -> None:
    dist.barrier()


def die_on_rank_1(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        print("last words")
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    time.sleep(1000)


def begin_alone_on_rank_1(rank: int, world_size: int) -> None:
    from shardwright.engine.comm import Communicator

    comm = Communicator(dist.group.WORLD, torch.device("cpu"))
    meeting = comm.meeting
    assert meeting is not None
    while (memory := meeting.shared_memory()) is None:
        assert comm.exchange((1,)) is None
    if rank == 1:
        for step in memory.gather([torch.empty(4)], [torch.ones(2)]).steps(1):
            step()


def return_a_lambda(rank: int, world_size: int) -> object:
    return lambda: rank


def test_results_come_back_by_rank_and_processes_are_reused(worker_pools: WorkerPools) -> None:
    first = worker_pools.run(pids, 2)
    assert len(set(first)) == 2 and os.getpid() not in first
    assert worker_pools.run(pids, 2) == first


def test_every_case_starts_from_the_same_state(worker_pools: WorkerPools) -> None:
    before = worker_pools.run(read_state, 2)
    worker_pools.run(disturb, 2)
    assert worker_pools.run(read_state, 2) == before
    same, different = worker_pools.run(draw, 2), worker_pools.run(draw, 2, own_seed=True)
    assert same[0] == same[1] and different[0] != different[1]


def test_failure_names_the_rank_and_shows_its_output(worker_pools: WorkerPools) -> None:
    with pytest.raises(CaseFailed) as failure:
        worker_pools.run(fail_on_rank_1, 2)
    report = str(failure.value)
    assert "=== rank 1 of 2: failed" in report and "assert secret_value == 40" in report
    assert "secret_value = 41" in report
    assert "--- output of rank 1\nrank 1 was here" in report
    assert "=== rank 0 of 2: passed" in report
    assert "worker.py" not in report, "the worker's own frames are noise"


def test_failure_comes_before_the_ranks_it_leaves_waiting(worker_pools: WorkerPools) -> None:
    with pytest.raises(CaseFailed) as failure:
        worker_pools.run(fail_while_others_wait, 3, grace=0.5)
    report = str(failure.value)
    assert report.index("ValueError: the true cause") < report.index("=== rank 0 of 3")
    assert report.count("no reply in time") == 2 and report.count("in fail_while_others_wait") == 3


def test_hang_fails_alone_with_every_stack(worker_pools: WorkerPools) -> None:
    before = worker_pools.run(pids, 2)
    with pytest.raises(CaseFailed) as failure:
        worker_pools.run(hang_on_rank_0, 2, timeout=1.0)
    report = str(failure.value)
    assert report.count("no reply in time") == 2
    assert "in hang_on_rank_0" in report and "in wait_for_rank_0" in report
    after = worker_pools.run(pids, 2)
    assert not set(before) & set(after)
    assert not any(_is_running(pid) for pid in before)


@pytest.mark.parametrize(
    ("how", "cause"),
    [("exit", "exited with status 7"), ("SIGKILL", "killed by SIGKILL"), ("SIGSEGV", "killed by SIGSEGV")],
)
def test_killed_worker_fails_alone(worker_pools: WorkerPools, how: str, cause: str) -> None:
    with pytest.raises(CaseFailed) as failure:
        worker_pools.run(die_on_rank_1, 2, grace=0.5, how=how)
    report = str(failure.value)
    assert f"=== rank 1 of 2: {cause}" in report and "last words" in report
    assert "=== rank 0 of 2: no reply in time" in report
    if how == "SIGSEGV":
        assert report.count("in die_on_rank_1") == 2
    assert len(worker_pools.run(pids, 2)) == 2


def test_a_collective_of_one_rank_alone_fails_its_own_case(worker_pools: WorkerPools) -> None:
    with pytest.raises(
        CaseFailed, match=r"begin_alone_on_rank_1 passed, and leaves ranks apart: .*collectives"
    ):
        worker_pools.run(begin_alone_on_rank_1, 2)
    assert len(worker_pools.run(pids, 2)) == 2


def test_result_that_cannot_be_pickled_is_named(worker_pools: WorkerPools) -> None:
    with pytest.raises(CaseFailed, match="expected a result that can be pickled"):
        worker_pools.run(return_a_lambda, 2)


@multirank(2)
def skip_everywhere(rank: int, world_size: int) -> None:
    pytest.skip("not here")


@multirank(2)
def fail_everywhere(rank: int, world_size: int) -> None:
    raise ValueError(f"rank {rank} fails")


def test_skip_and_failure_reach_pytest_as_such(worker_pools: WorkerPools) -> None:
    with pytest.raises(CaseSkipped, match="not here"):
        worker_pools.run(skip_everywhere, 2)
    with pytest.raises(pytest.skip.Exception, match="not here"):
        skip_everywhere(worker_pools, world_size=2)
    with pytest.raises(pytest.fail.Exception, match="rank 1 fails"):
        fail_everywhere(worker_pools, world_size=2)


def test_multirank_wants_a_number_of_ranks() -> None:
    with pytest.raises(TypeError, match="expects at least one number of ranks"):
        multirank()


def test_fifty_trivial_cases(worker_pools: WorkerPools) -> None:
    worker_pools.run(pids, 2)
    started = time.monotonic()
    for _ in range(50):
        worker_pools.run(pids, 2)
    milliseconds = (time.monotonic() - started) / 50 * 1e3
    print(f"overhead of a case on 2 ranks: {milliseconds:.1f} ms")  # shown by pytest -rP


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
