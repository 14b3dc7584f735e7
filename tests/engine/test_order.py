"""The guess for the order of units: a pure part, as a table."""

from __future__ import annotations

import pytest

from shardwright.engine.model.order import Order

SAME, LATER = [0, 1, 2, 3], [0, 2, 3]


@pytest.mark.parametrize(
    ("last", "now", "ahead"),
    [
        ([], [0, 1], [[], []]),
        (SAME, SAME, [[1], [2], [3], []]),
        (SAME, LATER, [[1], [3], []]),  # one is left out
        (SAME, [0, 7, 1], [[1], [], []]),  # an unknown one: nothing is guessed in the rest of the call
        (SAME, [3, 0], [[], []]),  # in another order
        ([0, 1, 0, 2], [0, 1, 0, 2], [[1], [0], [2], []]),  # twice
    ],
)
def test_one_unit_ahead(last: list[int], now: list[int], ahead: list[list[int]]) -> None:
    order = Order([])
    order.begin(0)
    for number in last:
        order.reach(number, 1)
    order.end(0)
    order.begin(0)
    assert [order.reach(number, 1) for number in now] == ahead
    assert order.seen == now


def test_each_caller_has_its_own() -> None:
    order = Order([5, 6])
    order.begin(0)
    assert order.reach(5, 2) == [6]  # the first guess
    order.end(0)
    order.begin(1)
    assert order.reach(5, 2) == [6]
    order.reach(9, 2)
    order.end(1)
    order.begin(0)
    assert order.reach(5, 2) == []
    order.begin(1)
    assert order.reach(5, 2) == [9]


def test_a_call_that_fails_is_no_guess() -> None:
    order = Order([])
    order.begin(0)
    order.reach(1, 1)
    order.begin(0)
    assert order.reach(0, 1) == []
    order.end(0)
    order.forget()
    order.begin(0)
    assert order.reach(0, 1) == []
