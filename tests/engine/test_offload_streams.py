"""Offload on a simulated accelerator: nothing races between its streams and the host, and nothing mixes their memory.

tests/engine/kit/simulated.py has the training runs and tests/support/races.py the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from shardwright._torch import memory_can_be_swapped
from shardwright.comm import DeviceStreams
from shardwright.engine.base.offload import Host
from shardwright.engine.gradients.delivery import OnHost
from shardwright.engine.weights.weights import Weights
from tests.engine.kit.simulated import BF16, EVENTS, FP16, FP32, Case, On, run, training_of
from tests.support.fake import fake_ranks
from tests.support.matrix import covering, together
from tests.support.races import Simulator

pytestmark = pytest.mark.filterwarnings("ignore:.*outside the plan:RuntimeWarning")

PLACES = [
    On("ddp", (2,)),
    On("zero1", (2, 2)),
    On("zero2", (2,)),
    On("zero3", (1,)),
    On("zero3", (8,), 2),
    On("zero3", (2,), True),
    On("hsdp", (2, 4), 2),
    On("hfsdp", (2, 2)),
]
MEMORY = ["dynamic", "arena"] if memory_can_be_swapped else ["dynamic"]
#: Owners of whole matrices are another matter.
NAMES = [
    event for event in EVENTS if event not in ("whole matrices", "optimizer on a stream", "hook on a stream")
]


def cases() -> list[Case]:
    rows = [
        Case(at, memory, prefetch, dtypes, accumulation, layout, event, offload)
        for number, event in enumerate(NAMES)
        for at in PLACES
        for memory in MEMORY
        for prefetch in (1, 0)
        for dtypes in ((None, None), (BF16, FP32), (BF16, BF16), (None, FP16))
        for accumulation in ("none", "held", "not last")
        for layout in ("per_parameter", "ragged")
        for offload in ("offload", "in backward")
    ]
    return covering(rows, _shows)


def _shows(row: Case) -> Iterator[Any]:
    """Each event and each place with both optimizers; the rest pair by pair."""
    yield from together(2, row.memory, row.prefetch, row.dtypes, row.accumulation, row.layout, row.offload)
    yield from ((row.event, row.offload), (row.on, row.offload), (row.on, row.accumulation))


CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_offloaded_training_is_in_order(case: Case) -> None:
    simulator = run(case)
    simulator.check()
    assert (
        simulator.operations["upload"] and simulator.operations["download"] and simulator.operations["host"]
    )


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


class Wrong(NamedTuple):
    case: Case
    defect: tuple[type, str, Any]
    told: tuple[str, ...]


WRONG = {
    "gathered before it is there": Wrong(
        Case(dtypes=(BF16, FP32), offload="offload"),
        (Host, "upload", upload_alone),
        ("write by aten::copy_ on 'upload'", "on 'gather'", "uploaded shard of"),
    ),
    "read before it is there": Wrong(
        Case(offload="offload"),
        (DeviceStreams, "host_wait", forget),
        ("write by aten::copy_ on 'download'", "on 'host'"),
    ),
    "given back before it is away": Wrong(
        Case(offload="offload"),
        (OnHost, "deliver", deliver_and_release),
        ("read by aten::copy_ on 'download'", "memory on 'computation'", "sum of"),
    ),
}


class NeverWaits(DeviceStreams):
    def host_wait(self, mark: Any) -> None:
        pass

    def is_over(self, mark: Any) -> bool:
        return True


def test_steps_before_gradients_are_there_are_found() -> None:
    told = ("write by aten::copy_ on 'download'", "read by aten::clone on 'host'")
    races = run(Case(offload="in backward"), NeverWaits).races
    assert any(all(part in race for part in told) for race in races), races


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_offload_is_found(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*wrong.defect)
    races = run(wrong.case).races
    assert any(all(part in race for part in wrong.told) for race in races), races


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("gathers_anew", [False, True])
def test_shards_are_not_written_while_they_are_read(
    gathers_anew: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the way of gathering was changed while they were being read."""
    if not waits:
        monkeypatch.setattr(Weights, "host_may_write", forget)
    with fake_ranks(2), Simulator() as simulator:
        training = training_of(Case(offload="offload"), simulator)
        training.step(0)
        for p in training.model.parameters():
            p.grad = torch.zeros_like(p)
        training.model.blocks[1].unshard(async_op=True)
        if gathers_anew:
            training.model.blocks[1].set_all_gather_codec(None)
        training.optimizer.step()
    told = ("read by aten::_foreach_copy_ on 'upload'", "on 'host'")
    assert any(all(part in race for part in told) for race in simulator.races) is not waits
