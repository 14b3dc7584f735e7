"""The engine on a simulated accelerator, whose streams run later, in orders drawn from seeds.

With work that runs at once the numbers are those of a plain model. With every other order of work they must be the same
in bits: a missing wait shows as other numbers or as NaN. The last tests take waits away, one after another.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardwright.engine.comm import DeviceStreams
from tests.engine.kit.edits_of_shards import EDITS
from tests.engine.kit.simulated import BF16, EVENTS_OF_DEVICE, FP32, Case, On
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
    "memory": ["dynamic", "double_buffer", "max_pool", "arena"],
    "prefetch": [1, 0, 3, "2 KiB"],
    "dtypes": [(None, None), (BF16, FP32), (BF16, BF16)],
    "accumulation": ["none", "held", "not all-reduced", "not last"],
    "layout": ["per_parameter", "ragged", "columns"],
    "offload": ["none", "offload", "state"],
    "steps": ["optimizer", "in backward"],
    "recompute": ["none", "recomputed", "reentrant", "parts", "recomputed parts"],
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
@pytest.mark.parametrize("event", [*EVENTS_OF_DEVICE, *EDITS])
def test_events_have_the_plain_model_s_numbers_in_any_order(rank: int, world_size: int, event: str) -> None:
    """Failures, hooks, edits, other orders, streams of the user's."""
    from tests.engine.kit.on_sim import check

    check(Case(event=event), SEEDS, steps=4)


# -- waits taken away ------------------------------------------------------------------------------------------------


def wrong_on(ranks: int) -> pytest.MarkDecorator:
    names = [name for name, wrong in WRONG.items() if math.prod(wrong.case.on.shape) == ranks]
    return pytest.mark.parametrize("name", names)


@on_sim(2)
@wrong_on(2)
def test_a_wrong_order_gives_other_numbers(rank: int, world_size: int, name: str) -> None:
    from tests.engine.kit.on_sim import shown

    assert shown(rank, world_size, name) is not None


@on_sim(4)
@wrong_on(4)
def test_a_wrong_order_gives_other_numbers_on_two_axes(rank: int, world_size: int, name: str) -> None:
    from tests.engine.kit.on_sim import shown

    assert shown(rank, world_size, name) is not None


# -- backward on another stream or thread ----------------------------------------------------------------------------


@on_sim(1, 2)
@pytest.mark.parametrize("memory", AXES["memory"][:1] + AXES["memory"][-1:])
def test_backward_may_run_on_another_stream_than_forward(rank: int, world_size: int, memory: str) -> None:
    from tests.engine.kit.on_sim import differences, put_in, train_across_streams

    case = Case(On("zero3", (world_size,)), memory)
    expected = train_across_streams(case, 0, 1)
    for seed in range(1, 4):
        assert not differences(expected, train_across_streams(case, seed + 3 * rank, 2)), seed
    if world_size == 1:  # forward's stream takes memory that backward's stream still uses
        with put_in((DeviceStreams, "rejoin", lambda self: None)):
            assert any(differences(expected, train_across_streams(case, seed, 2)) for seed in range(1, 4))


@on_sim(1)
def test_hooks_run_on_a_thread_of_autograd(rank: int, world_size: int) -> None:
    from tests.engine.kit.on_sim import threads_of_hooks

    threads = threads_of_hooks(Case(On("zero3", (1,))), 1)
    assert len(threads) == 1 and threading.get_ident() not in threads


# -- construction and checkpoints ------------------------------------------------------------------------------------


@on_sim(1, 2)
def test_deferred_construction_draws_the_device_s_numbers(rank: int, world_size: int) -> None:
    from tests.engine.kit.on_sim import built_alike

    assert all(built_alike(seed) for seed in (0, *SEEDS))


@on_sim(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("offload", ["none", "offload", "state"])
def test_checkpoints_have_the_numbers_of_their_step(
    rank: int, world_size: int, offload: str, asynchronous: bool, tmp_path: Path
) -> None:
    from tests.engine.kit.on_sim import differences, resumed

    case = Case(offload=offload)
    for seed in SEEDS:
        folder = str(tmp_path / f"seed {seed}")
        assert not differences(*resumed(case, seed + 3 * rank, folder, asynchronous)), seed


# -- what the host waits for -----------------------------------------------------------------------------------------

STEADY: dict[str, Any] = {
    "plain": {},
    "bfloat16": {"dtypes": (BF16, FP32)},
    "planned": {"memory": AXES["memory"][-1]},
    "ragged": {"layout": "ragged"},
    "accumulated": {"accumulation": "held"},
    "recomputed": {"recompute": "recomputed"},
    "reentrant": {"recompute": "reentrant"},
    "in backward": {"steps": "in backward"},
    "state offloaded": {"offload": "state"},
    "state offloaded, in backward": {"offload": "state", "steps": "in backward"},
    "kept": {"event": "kept after backward"},
    "encoded": {"event": "weights encoded"},
    "unsharded early": {"event": "unshard"},
    "in a graph": {"graphed": True},
    "in a graph, planned": {"graphed": True, "memory": "arena"},
}


@on_sim(1)
@pytest.mark.parametrize("name", STEADY)
def test_on_one_rank_the_host_never_waits_in_a_steady_step(rank: int, world_size: int, name: str) -> None:
    from tests.engine.kit.on_sim import waits_of_a_step

    assert not waits_of_a_step(Case(On("zero3", (1,)), **STEADY[name]))


#: Each backward has a comparison of its own. These steps read two: of two micro-batches, or also of the step before.
TWO = {"accumulated", "in backward", "state offloaded, in backward"}


@on_sim(2)
@pytest.mark.parametrize("name", STEADY)
def test_on_several_ranks_the_host_waits_once_for_each_backward(
    rank: int, world_size: int, name: str
) -> None:
    """For the comparison of the ranks, in front of the optimizer's step or the next forward."""
    from tests.engine.kit.on_sim import waits_of_a_step

    (wait,) = waits_of_a_step(Case(**STEADY[name])).items()
    assert wait[0].startswith("an event's synchronize in streams.py") and "host_flag.py" in wait[0]
    assert wait[1] == (2 if name in TWO else 1)


@on_sim(2)
@pytest.mark.parametrize("name", ["plain", "planned", "ragged", "recomputed"])
def test_the_host_waits_for_no_reduction(rank: int, world_size: int, name: str) -> None:
    """The comparison has a communicator of its own: one communicator's collectives run one after another."""
    from tests.engine.kit.on_sim import backwards_at_work

    assert sum(backwards_at_work(Case(**STEADY[name]), seed) for seed in (1, 4, 7))


OFFLOADED: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtypes": (BF16, FP32)},
    "planned": {"memory": "arena"},
    "ragged": {"layout": "ragged"},
    "accumulated": {"accumulation": "held"},
    "reduced twice": {"accumulation": "not last"},
    "in backward": {"steps": "in backward"},
}


@on_sim(1, 2)
@pytest.mark.parametrize("name", OFFLOADED)
def test_what_the_host_waits_for_with_offload(rank: int, world_size: int, name: str) -> None:
    """The list in docs/memory.md."""
    from tests.engine.kit.on_sim import waits_of_a_step

    case = Case(On("zero3", (world_size,)), offload="offload", **OFFLOADED[name])
    units = 4
    expected = {
        "an event's synchronize in delivery.py": units * (2 if case.accumulation == "not last" else 1),
        "an event's synchronize in offload.py": units,
    }
    if world_size > 1:
        expected["an event's synchronize in host_flag.py"] = (
            1 if case.micros == 1 and case.steps == "optimizer" else 2
        )
        if case.steps == "optimizer":
            expected |= {"a copy from the host in clip.py": 1, "a copy to the host in clip.py": 1}
    waits: Counter[str] = Counter()
    for wait, count in waits_of_a_step(case).items():
        what, _, places = wait.partition(" in ")
        files = [place.partition(":")[0] for place in places.split(" < ")]
        waits[f"{what} in {next(file for file in files if file != 'streams.py')}"] += count
    if case.steps == "optimizer":
        assert waits == expected
    else:  # with units of the step before, whose gradients have come late
        assert waits.keys() == expected.keys()
        assert all(expected[wait] <= count <= 2 * expected[wait] for wait, count in waits.items())
