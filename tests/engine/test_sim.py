"""The engine on a simulated accelerator, whose streams run later, in orders drawn from seeds."""

from __future__ import annotations

import math

import pytest

from tests.engine.kit.simulated import EVENTS, Case, On
from tests.engine.kit.wrong_streams import WRONG
from tests.support.sim import on_sim


@on_sim(2, timeout=600)
@pytest.mark.parametrize("event", EVENTS)
def test_try(rank: int, world_size: int, event: str) -> None:
    from tests.engine.kit.on_sim import differences, train

    case = Case(event=event)
    base = train(case, 0)
    for seed in range(1, 4):
        assert not differences(base, train(case, seed + 3 * rank)), seed


def wrong_on(ranks: int) -> pytest.MarkDecorator:
    names = [name for name, wrong in WRONG.items() if math.prod(wrong.case.on.shape) == ranks]
    return pytest.mark.parametrize("name", names)


@on_sim(2, timeout=600)
@wrong_on(2)
def test_a_wrong_order_gives_other_numbers(rank: int, world_size: int, name: str) -> None:
    from tests.engine.kit.on_sim import first_difference

    found = first_difference(WRONG[name].case, WRONG[name].defect, range(1, 13))
    print(found)
    with open(f"/tmp/h1_mutants_{rank}.txt", "a") as file: file.write(f"{name}: {found}\n")
    assert found is not None


@on_sim(4, timeout=600)
@wrong_on(4)
def test_a_wrong_order_gives_other_numbers_on_two_axes(rank: int, world_size: int, name: str) -> None:
    test_a_wrong_order_gives_other_numbers.multirank_body(rank, world_size, name)


@on_sim(1, 2, timeout=600)
@pytest.mark.parametrize("memory", ["dynamic", "arena"])
def test_backward_on_another_stream(rank: int, world_size: int, memory: str) -> None:
    from tests.engine.kit.on_sim import differences, train_across_streams

    case = Case(On("zero3", (world_size,)), memory)
    base = train_across_streams(case, 0, 1)
    for seed in range(1, 10):
        found = differences(base, train_across_streams(case, seed + 3 * rank, 2))
        print(seed, found[:3])
        assert not found
