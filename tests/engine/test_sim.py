"""The engine on a simulated accelerator, whose streams run later, in orders drawn from seeds.

With work that runs at once the numbers are those of a plain model. With every other order of work they must be the same
in bits: a missing wait shows as other numbers or as NaN. The last tests take waits away, one after another.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardwright._torch import memory_can_be_swapped
from tests.engine.kit.simulated import BF16, EVENTS, FP32, Case, On
from tests.engine.kit.wrong_streams import WRONG
from tests.support.matrix import generate
from tests.support.sim import on_sim

pytestmark = pytest.mark.filterwarnings("ignore:.*outside the plan:RuntimeWarning")

SEEDS = (1, 2)  #: one order that delays the side streams, and one that delays the computation
PLACES = [
    On("zero3", (1,)),
    On("ddp", (2,)),
    On("zero1", (2,)),
    On("zero2", (2,)),
    On("zero3", (2,)),
    On("zero3", (2,), True),
    On("zero3", (2,), False),
    On("zero3", (3,)),
    On("zero2", (3,)),
    On("hsdp", (2, 2)),
    On("hfsdp", (2, 2)),
    On("zero3", (2, 2), 2),
]
AXES: dict[str, list[Any]] = {
    "on": PLACES,
    "memory": ["dynamic", "double_buffer", "max_pool", "arena"] if memory_can_be_swapped else ["dynamic"],
    "prefetch": [1, 0, 3, "2 KiB"],
    "dtypes": [(None, None), (BF16, FP32), (BF16, BF16)],
    "accumulation": ["none", "held", "not all-reduced", "not last"],
    "layout": ["per_parameter", "ragged", "columns"],
    "offload": ["none", "offload", "state"],
    "steps": ["optimizer", "in backward"],
    "recompute": ["none", "recomputed", "reentrant"],
}


def excluded(one: str, a: Any, other: str, b: Any) -> bool:
    both = {one: a, other: b}
    if both.keys() == {"on", "memory"} or both.keys() == {"on", "layout"}:
        return not Case(**both).legal
    return False


CASES = [Case(**row) for row in generate(AXES, excluded, 2)]


def on_ranks(ranks: int) -> pytest.MarkDecorator:
    cases = [case for case in CASES if math.prod(case.on.shape) == ranks]
    return pytest.mark.parametrize("case", cases, ids=str)


@on_sim(1)
@on_ranks(1)
def test_training_on_one_rank_keeps_its_numbers_in_any_order(rank: int, world_size: int, case: Case) -> None:
    from tests.engine.kit.on_sim import check

    check(case, SEEDS)


@on_sim(2)
@on_ranks(2)
def test_training_on_two_ranks_keeps_its_numbers_in_any_order(rank: int, world_size: int, case: Case) -> None:
    from tests.engine.kit.on_sim import check

    check(case, SEEDS)


@on_sim(3)
@on_ranks(3)
def test_training_on_three_ranks_keeps_its_numbers_in_any_order(
    rank: int, world_size: int, case: Case
) -> None:
    from tests.engine.kit.on_sim import check

    check(case, SEEDS)


@on_sim(4)
@on_ranks(4)
def test_training_on_two_axes_keeps_its_numbers_in_any_order(rank: int, world_size: int, case: Case) -> None:
    from tests.engine.kit.on_sim import check

    check(case, SEEDS)


@on_sim(2)
@pytest.mark.parametrize("event", EVENTS)
def test_no_event_changes_numbers_in_any_order(rank: int, world_size: int, event: str) -> None:
    """Failures, hooks, other orders, streams of the user's: some change the numbers, and no order does."""
    from tests.engine.kit.on_sim import differences, train

    case = Case(event=event)
    expected = train(case, 0)
    for seed in SEEDS:
        assert not differences(expected, train(case, seed + 3 * rank)), seed


# -- waits taken away ------------------------------------------------------------------------------------------------


def wrong_on(ranks: int) -> pytest.MarkDecorator:
    names = [name for name, wrong in WRONG.items() if math.prod(wrong.case.on.shape) == ranks]
    return pytest.mark.parametrize("name", names)


@on_sim(2)
@wrong_on(2)
def test_a_wrong_order_gives_other_numbers(rank: int, world_size: int, name: str) -> None:
    from tests.engine.kit.on_sim import first_difference

    assert first_difference(WRONG[name].case, WRONG[name].defect, range(1, 13)) is not None


@on_sim(4)
@wrong_on(4)
def test_a_wrong_order_gives_other_numbers_on_two_axes(rank: int, world_size: int, name: str) -> None:
    from tests.engine.kit.on_sim import first_difference

    assert first_difference(WRONG[name].case, WRONG[name].defect, range(1, 13)) is not None


# -- backward on another stream --------------------------------------------------------------------------------------


@on_sim(1, 2)
@pytest.mark.parametrize("memory", AXES["memory"][:1] + AXES["memory"][-1:])
def test_backward_may_run_on_another_stream_than_forward(rank: int, world_size: int, memory: str) -> None:
    from tests.engine.kit.on_sim import differences, train_across_streams

    case = Case(On("zero3", (world_size,)), memory)
    expected = train_across_streams(case, 0, 1)
    for seed in range(1, 7):
        assert not differences(expected, train_across_streams(case, seed + 3 * rank, 2)), seed
