"""The simulated device: it runs work late and out of order where a device may, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwright.engine.comm import make_group
from tests.support.sim import load, on_sim

SEEDS = range(1, 13)


def copied(seed: int, *, waits: bool, joins: bool) -> list[float]:
    """A copy on a stream beside the one that has written the source and then reads the copy."""
    sim, api = load(), torch.get_device_module("sim")
    with sim.running(seed):
        side, current = api.Stream(), api.current_stream()
        source = torch.zeros(8, device="sim")
        target = torch.empty(8, device="sim")
        side.wait_stream(current)
        source.add_(1)
        if waits:
            side.wait_stream(current)
        with api.stream(side):
            target.copy_(source)
        if joins:
            current.wait_event(side.record_event())
        result = (target * 2).tolist()
        current.wait_stream(side)  # for the memory
        return result  # type: ignore[no-any-return]


@on_sim(1)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("joins", [True, False])
def test_a_missing_wait_gives_other_numbers(rank: int, world_size: int, waits: bool, joins: bool) -> None:
    right = [copied(seed, waits=waits, joins=joins) == [2.0] * 8 for seed in SEEDS]
    assert all(right) is (waits and joins)


def used_after_its_end(seed: int, recorded: bool) -> list[float]:
    """The stream that made a tensor drops it, and takes its memory again, while another one reads it."""
    sim, api = load(), torch.get_device_module("sim")
    with sim.running(seed):
        side, current = api.Stream(), api.current_stream()
        made = torch.ones(128, device="sim")
        side.wait_stream(current)
        with api.stream(side):
            result = made * 2
        if recorded:
            made.record_stream(side)
        del made
        torch.full((128,), 5.0, device="sim")
        current.wait_stream(side)
        return result.tolist()  # type: ignore[no-any-return]


@on_sim(1)
@pytest.mark.parametrize("recorded", [True, False])
def test_memory_is_used_again_in_stream_order(rank: int, world_size: int, recorded: bool) -> None:
    right = [used_after_its_end(seed, recorded) == [2.0] * 128 for seed in SEEDS]
    assert all(right) is recorded


@on_sim(1)
def test_memory_begins_with_nan_and_released_memory_is_refused(rank: int, world_size: int) -> None:
    with load().running(1):
        assert torch.empty(8, device="sim").isnan().all()
        tensor = torch.ones(8, device="sim")
        tensor.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="memory that was released"):
            tensor.add_(1)


@on_sim(1)
def test_numbers_are_drawn_when_they_are_asked_for(rank: int, world_size: int) -> None:
    drawn = []
    for seed in (0, 1, 2):
        with load().running(seed):
            torch.manual_seed(7)
            some = [torch.randn(5, device="sim"), torch.rand(3, device="sim")]
            some.append(torch.nn.functional.dropout(torch.ones(20, device="sim"), 0.5))
            drawn.append([t.tolist() for t in reversed(some)])
    assert drawn[0] == drawn[1] == drawn[2]


@on_sim(1)
def test_devices_are_not_mixed(rank: int, world_size: int) -> None:
    with load().running(1):
        ours = torch.ones(3, device="sim")
        assert (ours + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number
        for other in (torch.ones(3), torch.ones(1)):
            with pytest.raises(RuntimeError, match="same device"):
                ours + other
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(()).add_(ours.sum())


@on_sim(1)
def test_the_host_waits_for_what_it_reads(rank: int, world_size: int) -> None:
    sim = load()
    with sim.running(2), sim.waits() as waits:
        tensor = torch.arange(4.0).to("sim")
        pinned = torch.empty(4, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        tensor.mul_(2)
        done = torch.get_device_module("sim").current_stream().record_event()
        assert set(waits) == {"a copy from the host"}
        assert tensor.sum().item() == 12 and tensor.cpu().tolist() == [0, 2, 4, 6]
        done.synchronize()
        assert pinned.tolist() == [0, 1, 2, 3]
        assert tensor.nonzero().numel() == 3
    assert waits == {
        "a copy from the host": 1,
        "item": 1,
        "a copy to the host": 1,
        "an event's synchronize": 1,
        "aten::nonzero": 1,
    }


@on_sim(1)
def test_a_seed_gives_one_order(rank: int, world_size: int) -> None:
    """Also a wrong one."""
    for seed in SEEDS:
        first, again = (copied(seed, waits=False, joins=False) for _ in range(2))
        assert str(first) == str(again)


@on_sim(2, 3)
def test_collectives_are_queued_on_the_current_stream(rank: int, world_size: int) -> None:
    sim, api = load(), torch.get_device_module("sim")
    sim.join_groups()
    for seed in (0, 1, 2):
        with sim.running(seed + 3 * rank):
            side = api.Stream()
            mine = torch.full((2 * world_size,), float(rank + 1), device="sim")
            gathered = torch.empty(2 * world_size * world_size, device="sim")
            part = torch.empty(2, device="sim")
            side.wait_stream(api.current_stream())
            with api.stream(side):
                dist.all_gather_into_tensor(gathered, mine)
                dist.reduce_scatter_tensor(part, mine, op=dist.ReduceOp.AVG)
            api.current_stream().wait_stream(side)
            work = dist.all_reduce(mine, async_op=True)
            work.wait()
            assert gathered.view(world_size, -1)[:, 0].tolist() == [r + 1.0 for r in range(world_size)]
            assert part.tolist() == [(world_size + 1) / 2] * 2
            assert mine.tolist() == [world_size * (world_size + 1) / 2] * 2 * world_size
            sizes = [r + 1 for r in range(world_size)]
            sent = torch.arange(float(sum(sizes)), device="sim") + 100 * rank
            taken = torch.empty(world_size * (rank + 1), device="sim")
            dist.all_to_all_single(taken, sent, [rank + 1] * world_size, sizes)
            first = sum(sizes[:rank])
            assert taken.tolist() == [
                100.0 * r + first + i for r in range(world_size) for i in range(rank + 1)
            ]


@on_sim(3)
def test_communicators_split_off_the_job_s_need_every_rank(rank: int, world_size: int) -> None:
    sim = load()
    sim.join_groups()
    with sim.bound():
        if rank < 2:
            sim.patience = 0.5
            with pytest.raises(RuntimeError, match="2 of 3 ranks make a communicator"):
                dist.new_group([0, 1], use_local_synchronization=True)
            sim.patience = 60.0
            group = make_group([0, 1])
            assert dist.group.WORLD.bound_device_id == sim.device
            ones = torch.ones(2, device="sim")
            with sim.running(1):
                dist.all_reduce(ones, group=group)
                assert ones.tolist() == [2, 2]
        else:
            sim._splits += 1  # of the others, in vain
        assert make_group(range(3)).size() == 3  # of all ranks
