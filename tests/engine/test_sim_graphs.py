"""Steps in graphs on the simulated accelerator, whose streams run later: they have a plain model's numbers.

Its graphs have CUDA's rules. A replay runs on streams of its own, so that its work may run beside all that it does not
wait for. The last tests take waits away inside the captured region only.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.engine.kit.edits_of_shards import EDITS
from tests.engine.kit.simulated import BF16, EVENTS, FP32, Case, On
from tests.engine.kit.wrong_streams import WRONG_GRAPHS
from tests.support.matrix import generate
from tests.support.sim import on_sim

pytestmark = pytest.mark.filterwarnings("ignore:.*outside the plan:RuntimeWarning")

SEEDS = (1, 2)  #: one order that delays the side streams, and one that delays the computation
STEPS = 5  #: two without a graph, and three replays
AXES: dict[str, list[Any]] = {
    "on": [
        On("zero3", (1,)),
        On("ddp", (2,)),
        On("zero1", (2,)),
        On("zero2", (2,)),
        On("zero3", (2,)),
        On("zero3", (2,), True),
        On("zero3", (2,), False),
    ],
    "memory": ["dynamic", "double_buffer", "max_pool", "arena"],
    "prefetch": [1, 0, 3],
    "dtypes": [(None, None), (BF16, FP32), (BF16, BF16)],
    "accumulation": ["none", "held", "not all-reduced", "not last"],
    "layout": ["per_parameter", "ragged", "columns"],
    "recompute": ["none", "recomputed", "reentrant"],
}


def excluded(one: str, a: Any, other: str, b: Any) -> bool:
    both = {one: a, other: b}
    if both.keys() == {"on", "memory"} or both.keys() == {"on", "layout"}:
        return not Case(**both).legal
    return False


CASES = [Case(**row, graphed=True) for row in generate(AXES, excluded, 2)]
#: A graph repeats one step, and there are no gradients before it.
EVENTS_OF_GRAPHS = [event for event in (*EVENTS, *EDITS) if event not in ("another order", "zeros kept")]


def on_ranks(ranks: int) -> pytest.MarkDecorator:
    cases = [case for case in CASES if math.prod(case.on.shape) == ranks]
    return pytest.mark.parametrize("case", cases, ids=str)


@on_sim(1)
@on_ranks(1)
def test_a_graph_on_one_rank_keeps_its_numbers_in_any_order(rank: int, world_size: int, case: Case) -> None:
    from tests.engine.kit.on_sim import check

    check(case, SEEDS, STEPS)


@on_sim(2)
@on_ranks(2)
def test_a_graph_on_two_ranks_keeps_its_numbers_in_any_order(rank: int, world_size: int, case: Case) -> None:
    from tests.engine.kit.on_sim import check

    check(case, SEEDS, STEPS)


@on_sim(1, 2)
@pytest.mark.parametrize("event", EVENTS_OF_GRAPHS)
def test_events_around_and_in_a_graph(rank: int, world_size: int, event: str) -> None:
    """Edits between replays, failures, other streams in the step and beside it, hooks, codecs."""
    from tests.engine.kit.on_sim import check

    memory = "arena" if EVENTS_OF_GRAPHS.index(event) % 2 else "dynamic"
    check(Case(On("zero3", (world_size,)), memory, event=event, graphed=True), SEEDS, STEPS)


def captured(function: Any) -> tuple[Any, torch.Tensor]:
    """A function by a graph, and its result."""
    api = torch.get_device_module("sim")
    graph, source = api.CUDAGraph(), torch.zeros(64, device="sim")
    with api.graph(graph, stream=api.Stream()):
        result = function(source)

    def run(values: torch.Tensor) -> torch.Tensor:
        source.copy_(values)
        graph.replay()
        return result

    return run, result


def on_a_stream_that_is_not_joined(x: torch.Tensor) -> torch.Tensor:
    api = torch.get_device_module("sim")
    side = api.Stream()
    side.wait_stream(api.current_stream())
    with api.stream(side):
        return x * 2


def after_work_that_is_not_captured(x: torch.Tensor) -> torch.Tensor:
    api = torch.get_device_module("sim")
    api.current_stream().wait_stream(api.Stream())
    return x


REFUSED = {
    "was not joined": on_a_stream_that_is_not_joined,
    "dependency created on uncaptured work": after_work_that_is_not_captured,
    "operation not permitted when stream is capturing: item": lambda x: x + x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "no replay would draw again": lambda x: x.uniform_(),
    "not pinned": lambda x: x + torch.ones(64).to("sim", non_blocking=True),
    "a stream's synchronize": lambda x: torch.get_device_module("sim").current_stream().synchronize(),
}


@on_sim(1)
@pytest.mark.parametrize("words", REFUSED)
def test_a_capture_has_the_rules_of_cuda(rank: int, world_size: int, words: str) -> None:
    from tests.support.sim import load

    with load().running(1):
        with pytest.raises(RuntimeError) as caught:
            captured(REFUSED[words])
        errors = [caught.value, caught.value.__context__]
        assert any(words in str(error) for error in errors), errors
        run, _ = captured(lambda x: x * 2)
        assert run(torch.ones(64)).sum().item() == 128


@on_sim(1)
def test_a_replay_has_the_memory_of_its_capture(rank: int, world_size: int) -> None:
    from tests.support.sim import load

    def function(x: torch.Tensor) -> torch.Tensor:
        return ((x * 2).exp() + (x * 3).exp()).sum()

    with load().running(1):
        run, result = captured(function)
        for i in range(4):
            values = torch.full((64,), i / 4)
            others = [torch.full((64,), 7.0, device="sim") for _ in range(8)]
            assert run(values).item() == pytest.approx(function(values).item())
            assert result is run(values) and all(other.sum().item() == 7 * 64 for other in others)


@on_sim(1, 2)
def test_a_value_read_in_the_step_is_refused_and_the_model_trains_on(rank: int, world_size: int) -> None:
    from tests.engine.kit.on_sim import refused_capture

    refused_capture(Case(On("zero3", (world_size,)), graphed=True), 1)


# -- waits taken away ------------------------------------------------------------------------------------------------


@on_sim(2)
@pytest.mark.parametrize("name", WRONG_GRAPHS)
def test_a_wrong_order_in_a_graph_gives_other_numbers(rank: int, world_size: int, name: str) -> None:
    from tests.engine.kit.on_sim import shown

    assert shown(rank, world_size, name) is not None
