"""Offload on a simulated accelerator: nothing races between its streams and the host, and nothing mixes their memory.

tests/engine/kit/simulated.py has the training runs and tests/support/races.py the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

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
MEMORY = ["dynamic", "arena"]
#: Owners of whole matrices are another matter.
NAMES = [
    event for event in EVENTS if event not in ("whole matrices", "optimizer on a stream", "hook on a stream")
]


def cases() -> list[Case]:
    rows = [
        Case(at, memory, prefetch, dtypes, accumulation, layout, event, "offload", steps)
        for number, event in enumerate(NAMES)
        for at in PLACES
        for memory in MEMORY
        for prefetch in (1, 0)
        for dtypes in ((None, None), (BF16, FP32), (BF16, BF16), (None, FP16))
        for accumulation in ("none", "held", "not last")
        for layout in ("per_parameter", "ragged")
        for steps in ("optimizer", "in backward")
    ]
    return covering(rows, _shows)


def _shows(row: Case) -> Iterator[Any]:
    """Each event and each place with both optimizers; the rest pair by pair."""
    yield from together(2, row.memory, row.prefetch, row.dtypes, row.accumulation, row.layout, row.steps)
    yield from ((row.event, row.steps), (row.on, row.steps), (row.on, row.accumulation))


CASES = cases()


@pytest.mark.extensive(
    "each event with each optimizer", but=("*-offload-in_backward-*", "*-unshard-*", "*-not_last-*")
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_offloaded_training_is_in_order(case: Case) -> None:
    simulator = run(case)
    simulator.check()
    assert (
        simulator.operations["upload"] and simulator.operations["download"] and simulator.operations["host"]
    )


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("gathers_anew", [False, True])
def test_shards_are_not_written_while_they_are_read(
    gathers_anew: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the way of gathering was changed while they were being read."""
    if not waits:
        monkeypatch.setattr(Weights, "host_may_write", lambda *given: None)
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
