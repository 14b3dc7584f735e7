"""The accelerator's path on a simulated one: side streams, events, and memory that is released and used again.

The simulator (tests/support/races.py) finds what nothing orders. The first tests show that it does, with streams that
are wrong on purpose; then come training runs that must be in order. Numbers are not looked at here: the process group
is torch's "fake" one, in which every rank seems to have this rank's data.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright._torch import memory_can_be_swapped
from shardwright.comm import DeviceStreams, Pending
from shardwright.engine.front import module as engine_module
from shardwright.engine.gradients.reduction import Flight, Reduction
from shardwright.engine.weights.gather import Cast, Gather
from shardwright.engine.weights.weights import Weights
from tests.engine.kit.simulated import BF16, EVENTS, FP16, FP32, Case, On, run, training_of
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


class NeverJoins(DeviceStreams):
    def join(self, mark: Any) -> None:
        pass


def forks_early(*names: str) -> type[DeviceStreams]:
    """What is queued on these streams does not wait for the computation."""

    class ForksEarly(DeviceStreams):
        def fork(self, name: str) -> Any:
            return self.beside(name) if name in names else super().fork(name)

    return ForksEarly


class MarksEarly(DeviceStreams):
    """A mark stands before what was queued last."""

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        with super().fork(name):
            self.early = super().mark(name)
            yield

    def mark(self, name: str) -> Any:
        return self.early


class ForgetsEvents(DeviceStreams):
    def gather_after(self, event: Any) -> None:
        pass


class ForgetsWhatComesBefore(DeviceStreams):
    def beside(self, name: str, after: Any = None) -> Any:
        return super().beside(name)


def hook_without_waiting(hook: Callable[[torch.Tensor], None], stream: Any) -> Callable[[torch.Tensor], None]:
    def run(gradient: torch.Tensor) -> None:
        with torch.get_device_module(gradient.device).stream(stream):
            hook(gradient)

    return run


FORGOTTEN: list[Any] = []  #: gathers that nobody waits for; they would wait when they go


def release_without_waiting(self: Weights, release: Callable[[Weights], None] = Weights.release) -> None:
    FORGOTTEN.append(self._flight)
    self._flight = None
    release(self)


def start_and_release(self: Reduction, *given: Any, start: Any = Reduction.start) -> None:
    start(self, *given)
    self._packed.release()


def release_cast_early(self: Gather, *given: Any, begin: Any = Gather.begin) -> Pending:
    pending: Pending = begin(self, *given)
    for stage in self._stages:
        if isinstance(stage, Cast):
            stage.end()
    return pending


def next_with_new_output(
    self: Reduction, flight: Flight, after: Pending | None, go: Any = Reduction._next
) -> None:
    """The result of a later collective gets its memory when that is queued, which waits for nothing else."""
    if after is not None:
        flight.output = None
    go(self, flight, after)


class Wrong(NamedTuple):
    """What a defect is, in which case it shows, and the parts of a race that must be told."""

    case: Case
    defect: Any
    told: tuple[str, str, str]


GATHERS = "by c10d::allgather_into_tensor_coalesced_ on 'gather'"
SCATTERS = "by c10d::_reduce_scatter_base_ on 'reduce'"
SUMS = "by c10d::allreduce_ on 'all_reduce'"
PACKS = "write by aten::_chunk_cat on 'computation'"
DDP, HSDP = Case(On("ddp", (2,))), Case(On("hsdp", (2, 2)))
WRONG_STREAMS = {
    "weights are read too soon": Wrong(
        Case(),
        NeverJoins,
        (f"write {GATHERS}", "read by aten::embedding on 'computation'", "parameters of Net"),
    ),
    "gradients are read too soon": Wrong(
        DDP, NeverJoins, (f"write {SUMS}", "read by aten::_foreach_norm", "gradients of blocks.2")
    ),
    "gathered before the optimizer's step": Wrong(
        Case(),
        forks_early("gather"),
        ("write by aten::_foreach_addcdiv_ on 'computation'", f"read {GATHERS}", ""),
    ),
    "gathered before memory is free": Wrong(
        Case(),
        forks_early("gather"),
        ("a lease on 'computation'", f"write {GATHERS}", "parameters of blocks.0"),
    ),
    "reduced before packed": Wrong(
        Case(), forks_early("reduce"), (PACKS, f"read {SCATTERS}", "reduction of blocks.2")
    ),
    "summed before packed": Wrong(DDP, forks_early("all_reduce"), (PACKS, f"write {SUMS}", "gradients of")),
    "a mark before the gather": Wrong(
        Case(), MarksEarly, (f"write {GATHERS}", "read by aten::native_layer_norm", "parameters of blocks.0")
    ),
    "no event of the optimizer's": Wrong(
        Case(event="optimizer on a stream"),
        ForgetsEvents,
        ("write by aten::_foreach_addcdiv_ on 'user'", f"read {GATHERS}", ""),
    ),
    "replicas summed before reduced": Wrong(
        HSDP, ForgetsWhatComesBefore, (f"write {SCATTERS}", f"write {SUMS}", "gradients of blocks.2")
    ),
}
WRONG_ENGINES = {
    "a hook that does not wait": Wrong(
        Case(event="hook on a stream"),
        (engine_module, "_on_stream", hook_without_waiting),
        (f"write {SCATTERS}", "write by aten::mul_ on 'user'", "gradients of blocks.2"),
    ),
    "released under the gather": Wrong(
        Case(event="another order"),
        (Weights, "release", release_without_waiting),
        (f"write {GATHERS}", "the release of memory on 'computation'", "parameters of blocks.2"),
    ),
    "released under the gather, planned": Wrong(
        Case(event="another order", memory="max_pool"),
        (Weights, "release", release_without_waiting),
        (f"write {GATHERS}", "a release on 'computation'", "parameters of blocks.2"),
    ),
    "released under the reduction": Wrong(
        Case(),
        (Reduction, "start", start_and_release),
        (f"read {SCATTERS}", "the release of memory on 'computation'", "reduction of blocks.2"),
    ),
    "released under the reduction, planned": Wrong(
        Case(memory="arena"),
        (Reduction, "start", start_and_release),
        (f"read {SCATTERS}", "a release on 'computation'", "reduction of blocks.2"),
    ),
    "the cast released under the gather": Wrong(
        Case(dtypes=(BF16, FP32)),
        (Gather, "begin", release_cast_early),
        ("write by aten::_foreach_copy_ on 'gather'", "the release of memory", "cast shard of blocks.0"),
    ),
    "memory from behind the fork": Wrong(
        Case(On("zero3", (2, 2))),
        (Reduction, "_next", next_with_new_output),
        ("aten::empty (allocation) on 'computation'", f"write {SCATTERS}", ""),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_STREAMS.values(), ids=WRONG_STREAMS)
def test_wrong_streams_are_found(wrong: Wrong) -> None:
    races = run(wrong.case, wrong.defect).races
    assert any(all(part in race for part in wrong.told) for race in races), races


@pytest.mark.parametrize("wrong", WRONG_ENGINES.values(), ids=WRONG_ENGINES)
def test_a_wrong_engine_is_found(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong.case.memory != "dynamic" and not memory_can_be_swapped:
        pytest.skip("planned memory needs torch 2.12")
    monkeypatch.setattr(*wrong.defect)
    races = run(wrong.case).races
    assert any(all(part in race for part in wrong.told) for race in races), races


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
    ["dynamic", "arena", "max_pool"] if memory_can_be_swapped else ["dynamic"],
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
