"""The accelerator's path on a simulated one: side streams, events, and memory that is released and used again.

The simulator (tests/support/races.py) finds what nothing orders. The first tests show that it does, with streams that
are wrong on purpose; then come training runs that must be in order. Numbers are not looked at here: the process group
is torch's "fake" one, in which every rank seems to have this rank's data.
"""

from __future__ import annotations

import gc
import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from tests.engine.kit.simulated import BF16, EVENTS, FP16, FP32, Case, On, run, training_of
from tests.engine.kit.wrong_streams import WRONG, Wrong, race_of
from tests.support.fake import fake_ranks
from tests.support.races import NoMemoryError, RaceError, Simulator

pytestmark = pytest.mark.filterwarnings("ignore:.*outside the plan:RuntimeWarning")


# -- what is found ---------------------------------------------------------------------------------------------------


def copy_beside(simulator: Simulator, *, waits: bool, joins: bool) -> None:
    """A copy on a stream beside the computation, which has written the source and then reads the copy."""
    device, side = simulator.device, simulator.device.Stream()
    source = torch.zeros(8)
    copied = torch.empty(8)
    source.add_(1)
    if waits:
        side.wait_stream(device.current_stream())
    with device.stream(side):
        copied.copy_(source)
    if joins:
        device.current_stream().wait_event(side.record_event())
    copied.sum()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("joins", [True, False])
def test_a_race_is_two_accesses_without_order(waits: bool, joins: bool) -> None:
    with Simulator() as simulator:
        copy_beside(simulator, waits=waits, joins=joins)
    told = "\n".join(simulator.races)
    assert (
        "write by aten::add_ on 'computation'" in told and "read by aten::copy_ on 'stream" in told
    ) is not waits
    assert ("write by aten::copy_" in told and "read by aten::sum on 'computation'" in told) is not joins
    assert bool(told) is not (waits and joins)


@pytest.mark.parametrize("apart", [True, False])
def test_bytes_that_do_not_overlap_do_not_race(apart: bool) -> None:
    with Simulator() as simulator:
        memory = torch.zeros(8)
        side = simulator.device.Stream()
        side.wait_stream(simulator.current)
        with simulator.device.stream(side):
            memory[:4].add_(1)
        memory[4 if apart else 3 :].mul_(2)
        simulator.current.wait_stream(side)
        del memory
    assert bool(simulator.races) is not apart


@pytest.mark.parametrize("joins", [True, False])
def test_memory_ends_after_its_last_use(joins: bool) -> None:
    """Its stream may give it to the next tensor at once."""
    with Simulator() as simulator:
        memory, side = torch.zeros(8), simulator.device.Stream()
        side.wait_stream(simulator.current)
        with simulator.device.stream(side):
            memory.sum()
        if joins:
            simulator.current.wait_stream(side)
        del memory
    assert bool(simulator.races) is not joins
    assert joins or "the end of a tensor" in next(iter(simulator.races))


@pytest.mark.parametrize("waits", [True, False])
def test_memory_begins_after_what_its_stream_has_queued(waits: bool) -> None:
    with Simulator() as simulator:
        side = simulator.device.Stream()
        if not waits:
            side.wait_stream(simulator.current)
        memory = torch.empty(8)
        if waits:
            side.wait_stream(simulator.current)
        with simulator.device.stream(side):
            memory.zero_()
        simulator.current.wait_stream(side)
        del memory
    assert bool(simulator.races) is not waits


def test_what_the_host_has_waited_for_is_over() -> None:
    with Simulator() as simulator:
        memory, side = torch.zeros(8), simulator.device.Stream()
        memory.add_(1)
        assert memory.sum().item() == 8
        with simulator.device.stream(side):
            memory.mul_(2)
            assert memory.tolist() == [2.0] * 8
        memory.add_(1)
    simulator.check()


def test_released_memory_is_not_read() -> None:
    with Simulator(), pytest.raises(NoMemoryError, match="aten::sum reads released memory"):
        memory = torch.zeros(8)
        memory.untyped_storage().resize_(0)
        memory.sum()


def test_asynchronous_collectives_are_refused() -> None:
    with fake_ranks(2), Simulator() as simulator, pytest.raises(RaceError, match="async_op=True"):
        dist.all_reduce(torch.zeros(8), async_op=True)
    simulator.check()


# -- streams and an engine that are wrong ----------------------------------------------------------------------------


@pytest.mark.extensive(
    "each wait; `make defects` takes all of them away",
    but=(
        "weights are read too soon",
        "gradients are read too soon",
        "reduced before packed",
        "released under*",
    ),
)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_order_is_found(wrong: Wrong) -> None:
    assert race_of(wrong) is not None


# -- training --------------------------------------------------------------------------------------------------------

PLACES = [
    On("ddp", (2,)),
    On("ddp", (2, 2)),
    On("zero1", (8,)),
    On("zero1", (2, 2)),
    On("zero2", (2,)),
    On("zero3", (1,)),
    On("zero3", (2,)),
    On("zero3", (2,), True),
    On("zero3", (8,), False),
    On("zero3", (8,), 2),
    On("zero3", (2, 2)),
    On("hsdp", (2, 2)),
    On("hsdp", (2, 4), 2),
    On("hfsdp", (2, 2)),
    On("hfsdp", (2, 4), True),
    On("hfsdp", (2, 4), 2),
    On(sw.Strategy.of_stages(2, 3), (2, 2)),
    On(sw.Strategy.of_stages(1, 2), (2, 2)),
]
CHOICES: list[list[Any]] = [
    PLACES,
    ["dynamic", "arena", "max_pool"],
    [1, 0, 3, "2 KiB"],
    [(None, None), (BF16, FP32), (BF16, BF16), (None, FP16)],
    ["none", "held", "not all-reduced", "not last"],
    ["per_parameter", "ragged", "columns"],
]


def pairwise() -> list[Case]:
    """Cases in which every two choices meet that may, with the events in turn."""
    draw = random.Random(0)
    pairs = {
        ((i, str(a)), (j, str(b)))
        for (i, first), (j, second) in itertools.combinations(enumerate(CHOICES), 2)
        for a, b in itertools.product(first, second)
    }
    legal = [case for made in itertools.product(*CHOICES) if (case := Case(*made)).legal]
    met = {
        case: set(itertools.combinations([(i, str(v)) for i, v in enumerate(case[:6])], 2)) for case in legal
    }
    left = pairs & set().union(*met.values())
    chosen: list[Case] = []
    while left:
        best = max(draw.sample(legal, 200), key=lambda case: len(met[case] & left))
        if not met[best] & left:
            best = max(legal, key=lambda case: len(met[case] & left))
        left -= met[best]
        chosen.append(best._replace(event=EVENTS[len(chosen) % len(EVENTS)]))
    return chosen


CASES = pairwise()


@pytest.mark.extensive("every event at every place", but=("zero3@2-*", "ddp@2-*arena*"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_in_order(case: Case) -> None:
    simulator = run(case)
    simulator.check()
    on_side = {name for name in simulator.side if simulator.operations.get(name)}
    sums = any(n > 1 and stage == 0 for stage, n in zip(case.on.stages, case.on.shape, strict=True))
    scatters = any(n > 1 and stage for stage, n in zip(case.on.stages, case.on.shape, strict=True))
    assert on_side == {"gather"} | ({"reduce"} if scatters else set()) | ({"all_reduce"} if sums else set())


@pytest.mark.parametrize(
    "on", [On("zero3", (1,)), On("zero2", (1,)), On("ddp", (2,)), On("hsdp", (2, 1))], ids=str
)
def test_weights_in_place_wait_for_the_optimizer_s_event(on: On) -> None:
    run(Case(on, event="optimizer on a stream")).check()


@pytest.mark.extensive("each number of ranks", but=("*-2",))
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("left", ["a gather", "a backward"])
def test_a_model_may_go_with_a_collective_under_way(left: str, ranks: int) -> None:
    with fake_ranks(ranks), Simulator() as simulator:
        training = training_of(Case(On("zero3", (ranks,))), simulator)
        training.step(0)
        if left == "a gather":
            training.model.blocks[1].unshard(async_op=True)
        else:
            training.fail(2)
        training.model, training.optimizer = None, None  # type: ignore[assignment]
        gc.collect()
    simulator.check()
