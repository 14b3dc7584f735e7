"""Streams and engines that are wrong on purpose: each lacks an order that the engine must keep.

The simulator of clocks (tests/support/races.py) must tell each as a race, and on the simulated device
(tests/support/sim) each must give other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from shardwright.engine import Host
from shardwright.engine.comm import DeviceStreams, HostFlag, Pending
from shardwright.engine.front import module as engine_module
from shardwright.engine.gradients.delivery import OnHost
from shardwright.engine.gradients.reduction import Flight, Reduction
from shardwright.engine.weights.gather import CastShards, Gather
from shardwright.engine.weights.residence import Residence
from shardwright.engine.weights.weights import Weights
from shardwright.optim.host_state import HostState
from tests.engine.kit.offload_state import unawaited
from tests.engine.kit.simulated import BF16, FP32, Case, On, run


class NeverJoins(DeviceStreams):
    def join(self, mark: Any) -> None:
        pass


def forks_early(*names: str) -> type[DeviceStreams]:
    """Work that is queued on these streams does not wait for the computation."""

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


def read_at_once(self: HostFlag, read: Any = HostFlag.read) -> bool:
    """Does not wait for the flag's copy."""
    self._mark = None
    return read(self)  # type: ignore[no-any-return]


def release_without_waiting(self: Weights, release: Callable[[Weights], None] = Weights.release) -> None:
    FORGOTTEN.append(self._flight)
    if self._flight is not None:
        self._flight, self.residence = None, Residence.RESIDENT
    release(self)


def start_and_release(self: Reduction, *given: Any, start: Any = Reduction.start) -> None:
    start(self, *given)
    self._packed.slab.release()


def release_cast_early(self: Gather, *given: Any, begin: Any = Gather.begin) -> Pending:
    pending: Pending = begin(self, *given)
    for stage in self._stages:
        if isinstance(stage, CastShards):
            stage.end()
    return pending


def next_with_new_output(
    self: Reduction, flight: Flight, after: Pending | None, go: Any = Reduction._next
) -> None:
    """The result of a later collective gets its memory when that is queued, which waits for nothing else."""
    if after is not None:
        flight.output = None
    go(self, flight, after)


def upload_alone(self: Host, targets: Any, sources: Any) -> Any:
    """The gather does not wait for it."""
    with self.streams.fork("upload"):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    return self.streams.mark("upload")


def deliver_and_release(self: OnHost, *given: Any, deliver: Any = OnHost.deliver) -> None:
    """The sum's memory is given back while the copy reads it."""
    deliver(self, *given)
    self._sum.release()


def forget(self: Any, *given: Any) -> None:
    """Does not wait."""


class TakesAllForOver(DeviceStreams):
    def host_wait(self, mark: Any) -> None:
        pass

    def is_over(self, mark: Any) -> bool:
        return True


def give_back_early(self: HostState, keep: int) -> None:
    """Gives memory back while copies read it."""
    while len(self._leaving) > keep:
        gone = self._leaving.pop(0)
        gone.slab.release()
        gone.tensors.clear()


class Wrong(NamedTuple):
    """A defect, a case in which it shows, and words of the race."""

    case: Case
    defect: Any
    words: tuple[str, ...]


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
    "a flag is read too soon": Wrong(
        Case(event="a rank steps twice"),
        (HostFlag, "read", read_at_once),
        ("write by aten::copy_ on 'gather'", "on 'host'"),
    ),
    "released under the gather": Wrong(
        Case(event="another order"),
        (Weights, "release", release_without_waiting),
        (f"write {GATHERS}", "the release of memory on 'computation'", "parameters of blocks.2"),
    ),
    "released under the gather, planned": Wrong(
        Case(On("zero3", (2,), False), event="another order", memory="arena"),
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
OFFLOADED, LATER = Case(offload="offload"), Case(offload="state")
WRONG_OFFLOAD = {
    "gathered before it is there": Wrong(
        Case(dtypes=(BF16, FP32), offload="offload"),
        (Host, "upload", upload_alone),
        ("write by aten::copy_ on 'upload'", "on 'gather'", "uploaded shard of"),
    ),
    "read before it is there": Wrong(
        OFFLOADED,
        (DeviceStreams, "host_wait", forget),
        ("write by aten::copy_ on 'download'", "on 'host'"),
    ),
    "given back before it is away": Wrong(
        OFFLOADED,
        (OnHost, "deliver", deliver_and_release),
        ("read by aten::copy_ on 'download'", "memory on 'computation'", "sum of"),
    ),
    "stepped before gradients are there": Wrong(
        OFFLOADED._replace(steps="in backward"),
        TakesAllForOver,
        ("write by aten::copy_ on 'download'", "read by aten::clone on 'host'"),
    ),
} | {
    f"{name}, {steps}": Wrong(LATER._replace(steps=steps), defect, words)
    for steps in ("optimizer", "in backward")
    for name, defect, words in [
        (
            "state given back early",
            (HostState, "_free", give_back_early),
            ("on 'download'", "memory on 'computation'"),
        ),
        (
            "stepped before its state is there",
            (HostState, "take", unawaited(HostState.take)),
            ("on 'upload'", "on 'computation'"),
        ),
    ]
}

WRONG: dict[str, Wrong] = WRONG_STREAMS | WRONG_ENGINES | WRONG_OFFLOAD


def replay_alone(self: DeviceStreams, function: Any, capture: Any = DeviceStreams.capture) -> Any:
    """The side streams do not wait for a replay, nor it for them."""
    replay, result = capture(self, function)

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "_side", {})
            replay()

    return run, result


#: Their waits are not in a graph, but before or after it.
OUTSIDE_GRAPHS = (
    "gradients are read too soon",
    "no event of the optimizer's",
    "a hook that does not wait",
    "a flag is read too soon",
)
#: Wrong orders that are there only while a graph is captured.
WRONG_GRAPHS: dict[str, Wrong] = {
    f"{name}, in a graph": wrong._replace(case=wrong.case._replace(graphed=True))
    for name, wrong in (WRONG_STREAMS | WRONG_ENGINES).items()
    if wrong.case.on.shape == (2,) and wrong.case.event != "another order" and name not in OUTSIDE_GRAPHS
} | {
    "replayed beside the side streams": Wrong(
        Case(graphed=True), (DeviceStreams, "capture", replay_alone), ()
    ),
    "replayed beside the optimizer": Wrong(
        Case(event="optimizer on a stream", graphed=True), (DeviceStreams, "capture", replay_alone), ()
    ),
    "two streams in a graph": Wrong(
        Case(event="streams in the step", memory="arena", accumulation="held", graphed=True),
        (DeviceStreams, "rejoin", forget),
        (),
    ),
}


def race_of(wrong: Wrong) -> str | None:
    """The race that the simulator of clocks finds, if it is the expected one."""
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(wrong.defect, tuple):
            patch.setattr(*wrong.defect)
            races = run(wrong.case).races
        else:
            races = run(wrong.case, wrong.defect).races
    FORGOTTEN.clear()
    return next((race for race in races if all(part in race for part in wrong.words)), None)
