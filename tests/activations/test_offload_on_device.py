"""Activations in the host's memory on the simulated accelerator, whose streams run later.

The numbers are those of a plain model in every order of work, also in a graph. The last tests take waits away.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.activations.offload import ActivationOffload
from shardwright.engine.comm import DeviceStreams
from tests.engine.kit.simulated import BF16, FP32, Case, On
from tests.engine.kit.wrong_streams import forks_early
from tests.support.matrix import generate
from tests.support.sim import on_sim

pytestmark = pytest.mark.filterwarnings("ignore:.*outside the plan:RuntimeWarning")

SEEDS = (1, 2)  #: one order that delays the side streams, and one that delays the computation
AXES: dict[str, list[Any]] = {
    "activations": ["blocks", "full", "ops"],
    "on": [On("zero3", (2,)), On("zero3", (2,), False), On("zero2", (2,)), On("ddp", (2,))],
    "memory": ["dynamic", "arena", "double_buffer"],
    "dtypes": [(None, None), (BF16, FP32)],
    "accumulation": ["none", "held"],
    "offload": ["none", "offload"],
    "event": ["none", "failures", "another order", "training on a stream"],
    "graphed": [False, True],
}


def excluded(one: str, a: Any, other: str, b: Any) -> bool:
    both = {one: a, other: b}
    if both.keys() == {"on", "memory"}:
        return not Case(**both).legal
    if both.get("graphed"):
        return both.get("offload") == "offload" or both.get("event") in ("another order", "failures")
    return False


@pytest.mark.extensive("each pair of settings", but=("zero2@2-None-arena-*",))
@on_sim(2)
@pytest.mark.parametrize("case", [Case(**row) for row in generate(AXES, excluded, 2)], ids=str)
def test_numbers_are_those_of_the_plain_model_in_any_order(rank: int, world_size: int, case: Case) -> None:
    from tests.engine.kit.on_sim import check

    check(case, SEEDS, steps=5 if case.graphed else 4)


@pytest.mark.extensive("each kind", but=("ops-True*",))
@on_sim(1)
@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("activations", ["blocks", "full", "ops"])
def test_the_host_never_waits_in_a_steady_step(
    rank: int, world_size: int, activations: str, graphed: bool
) -> None:
    from tests.engine.kit.on_sim import waits_of_a_step

    assert not waits_of_a_step(Case(On("zero3", (1,)), activations=activations, graphed=graphed))


def leave_at_once(self: ActivationOffload) -> None:
    """Releases the device's memory under the copy."""
    for copy in self._leaving:
        if copy.call is not None:
            self._let_go(copy.call)
    self._leaving.clear()


def wait_for_nothing(self: ActivationOffload, storage: Any) -> None:
    """Reads what has not come yet."""
    if storage.memory is None:
        self._copy_back([storage])


def arrive_at_once(self: ActivationOffload) -> None:
    self._coming.clear()


WRONG: dict[str, list[tuple[Any, str, Any]]] = {
    "released under the copy": [(ActivationOffload, "_leave", leave_at_once)],
    "read before they are there": [
        (ActivationOffload, "wait_for", wait_for_nothing),
        (ActivationOffload, "_arrive", arrive_at_once),
    ],
    "copied before they are computed": [(DeviceStreams, "fork", forks_early("store").fork)],
    "copied into memory in use": [(DeviceStreams, "fork", forks_early("fetch").fork)],
}


@pytest.mark.extensive("each order", but=("copied before*",))
@on_sim(2)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_order_gives_other_numbers(rank: int, world_size: int, name: str) -> None:
    from tests.engine.kit.on_sim import first_difference

    case = Case(activations="blocks")
    with pytest.MonkeyPatch.context() as patch:
        for owner, attribute, function in WRONG[name][1:]:
            patch.setattr(owner, attribute, function)
        assert first_difference(case, WRONG[name][0], range(1, 61)) is not None
