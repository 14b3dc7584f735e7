"""Verdicts on what is seen of the ranks: when there is none yet, which case it is, and whom it names."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from shardwright.engine import heartbeat
from shardwright.watching import STOPPED
from shardwright.watching.diagnosis import ALONE, BEHIND, JOINED, MIXED, OUTSIDE, diagnose
from shardwright.watching.reading import ENDED, LEFT, RUNS, SILENT, Seen

STALL = 10.0


def computing(rank: int, age: float, begun: int = 4, **others: Any) -> Seen:
    """A rank that has begun `begun` collectives and is in none."""
    others = {
        "host": "",
        "phase": heartbeat.BACKWARD,
        "unit": "layers.7",
        "process": RUNS,
        "answers": True,
        "step": 5,
        **others,
    }
    return Seen(rank, pid=100 + rank, age=age, counts={"0-3": begun}, **others)


def waiting(rank: int, age: float, count: int = 5, name: str = "reduce-scatter", **others: Any) -> Seen:
    """A rank that waits in the collective of all four ranks with this number."""
    subject = {"collective": name, "group": "0-3", "count": count, "subject": "layers.9"}
    return computing(rank, age, count, **{**subject, **others})


THREE = [waiting(0, 31), waiting(1, 31), waiting(3, 31)]


def test_the_rank_behind_is_named_with_its_place() -> None:
    verdict = diagnose([*THREE, computing(2, 31.4, process=STOPPED)], STALL)
    assert verdict is not None
    assert (verdict.kind, verdict.culprits, verdict.lost, verdict.step) == (OUTSIDE, (2,), True, 5)
    assert verdict.reason == (
        "rank 2: backward of layers.7 since 31 s, process stopped (T), pid 102; "
        "ranks 0, 1, 3 wait in reduce-scatter of layers.9 since 31 s"
    )


@pytest.mark.parametrize(
    "seen",
    [
        [waiting(0, 9), waiting(1, 9), computing(2, 9), waiting(3, 9)],  # not long enough
        [*THREE, computing(2, 2)],  # it goes on: another rank is slow, and does something
        [*THREE, computing(2, 31, patient=True)],  # it compiles or loads
        [*THREE, computing(2, 31, phase=heartbeat.SAVE, patient=True)],
        [computing(rank, 99, phase=heartbeat.OUTSIDE) for rank in range(4)],  # code of a user, for which nobody waits
        [replace(each, patient=True) for each in [*THREE, waiting(2, 31)]],  # a first collective connects hosts
    ],
)  # fmt: skip
def test_no_verdict_yet(seen: list[Seen]) -> None:
    assert diagnose(seen, STALL) is None


@pytest.mark.parametrize(
    ("fourth", "kind", "culprits"),
    [
        (computing(2, 31), OUTSIDE, (2,)),
        (
            computing(2, 31, patient=True, process=STOPPED),
            OUTSIDE,
            (2,),
        ),  # no patience with what cannot go on
        (computing(2, 31, process=ENDED), OUTSIDE, (2,)),
        (computing(2, 31, process=LEFT, phase=heartbeat.END), OUTSIDE, (2,)),
        (computing(2, 31, process=SILENT, host="b"), BEHIND, (2,)),
        (waiting(2, 31, 4, answers=False), BEHIND, (2,)),
        (waiting(2, 31, process=STOPPED), BEHIND, (2,)),  # it has begun the same collective
        (waiting(2, 31), JOINED, ()),
        (waiting(2, 31, name="all-gather"), MIXED, ()),
        (waiting(2, 31, 4, name="all-gather"), MIXED, ()),
    ],
)
def test_cases_are_told_apart(fourth: Seen, kind: str, culprits: tuple[int, ...]) -> None:
    verdict = diagnose([*THREE, fourth], STALL)
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (kind, culprits)


def test_the_root_of_a_chain_is_named() -> None:
    """Rank 0 waits for 1 in one group, 1 waits for 2 in another; 2 computes."""
    rows = [
        replace(waiting(0, 31, 5), group="0-1", counts={"0-1": 5}),
        replace(waiting(1, 31, 7), group="1-2", counts={"0-1": 4, "1-2": 7}),
        replace(computing(2, 31), counts={"1-2": 6}),
    ]
    verdict = diagnose(rows, STALL)
    assert verdict is not None and verdict.culprits == (2,)


def test_a_job_without_waiting_ranks() -> None:
    verdict = diagnose([computing(rank, 31) for rank in range(4)], STALL)
    assert verdict is not None and (verdict.kind, verdict.culprits) == (ALONE, (0, 1, 2, 3))
    between_steps = [computing(0, 31, phase=heartbeat.OUTSIDE)]
    assert diagnose(between_steps, STALL) is None
    verdict = diagnose(between_steps, STALL, strict=True)
    assert verdict is not None and verdict.kind == ALONE
    assert verdict.headline == "the job hangs in step 5: rank 0 does not go on, outside any collective"


@pytest.mark.parametrize(
    ("around", "place"),
    [
        (heartbeat.VALIDATION, "in the validation after step 4"),
        (heartbeat.SAMPLE, "in the sample after step 4"),
        (heartbeat.SAVE, "in the save after step 4"),
        (heartbeat.OUTSIDE, "in step 5"),
    ],
)
def test_a_hang_between_steps_is_not_in_the_next_one(around: int, place: str) -> None:
    verdict = diagnose([*THREE, computing(2, 31, around=around, phase=heartbeat.FORWARD)], STALL)
    assert verdict is not None
    assert verdict.headline.startswith(f"the job hangs {place}: rank 2 is behind")
    assert verdict.done == 4
    inside = f" in the {place.split()[2]}" if around != heartbeat.OUTSIDE else ""
    assert verdict.reason.startswith(f"rank 2: forward of layers.7{inside} since 31 s; ")


def test_ranks_after_different_steps_say_which() -> None:
    late = computing(2, 31, around=heartbeat.VALIDATION, phase=heartbeat.VALIDATION, unit="", step=4)
    verdict = diagnose([*THREE, late], STALL)
    assert verdict is not None
    assert verdict.reason == (
        "rank 2: validation since 31 s, after step 3; "
        "ranks 0, 1, 3 wait in reduce-scatter of layers.9 since 31 s, step 5"
    )


@pytest.mark.parametrize(
    ("culprit", "way"),
    [
        (computing(2, 31), []),
        (
            computing(2, 31, answers=False),
            ["A call into C or C++ code keeps the interpreter and does not return."],
        ),
    ],
)
def test_a_verdict_promises_no_stacks(culprit: Seen, way: list[str]) -> None:
    """Whoever writes them says so."""
    verdict = diagnose([*THREE, culprit], STALL)
    assert verdict is not None
    assert verdict.text.splitlines()[3:] == way and "stacks" not in verdict.text


def test_collectives_of_the_flight_recorder_count() -> None:
    """A barrier of a user is on no heartbeat."""
    outside = {"phase": heartbeat.OUTSIDE, "unit": ""}
    rows = [
        replace(computing(rank, 31, **outside), flights=(("barrier", "0-3#0", 1, 31.0),))
        for rank in (0, 1, 3)
    ]
    rows = [replace(each, counts={"0-3#0": 1}) for each in rows]
    verdict = diagnose([*rows, replace(computing(2, 31), counts={"0-3#0": 0})], STALL)
    assert verdict is not None and verdict.culprits == (2,)
    assert "ranks 0, 1, 3 wait in barrier (outside the model)" in verdict.reason


def test_each_host_that_does_not_answer_is_named() -> None:
    silent = [Seen(rank, host, 0, SILENT, None, 31.0) for rank, host in ((2, "b"), (3, "c"))]
    verdict = diagnose([waiting(0, 31), waiting(1, 31), *silent], STALL)
    assert verdict is not None
    assert verdict.reason.startswith(
        "rank 2: host b does not answer since 31 s; rank 3: host c does not answer since 31 s; "
    )


@pytest.mark.parametrize("lost", [("b", "c"), ("a", "c"), ("b",), ("c",)])
def test_a_host_that_hears_no_other_one_names_itself_too(lost: tuple[str, ...]) -> None:
    """A cut link looks the same at both ends. Only a host that others answer is sure."""
    hosts = {0: "a", 1: "b", 2: "b", 3: "c"}
    seen = [
        Seen(rank, host, 0, SILENT, None, 31.0) if host in lost else waiting(rank, 31, host=host)
        for rank, host in hosts.items()
    ]
    verdict = diagnose(seen, STALL)
    assert verdict is not None and verdict.culprits == tuple(r for r, host in hosts.items() if host in lost)
    here = {*hosts.values()} - {*lost}
    alone = f"No other host answers host {min(here)}, so its own link may be cut"
    assert (alone in verdict.text) == (len(here) == 1)
    assert all(f"host {host} does not answer" in verdict.reason for host in lost)


def test_what_is_seen_travels_as_json() -> None:
    seen = waiting(1, 2.5, flights=(("barrier", "0-3#0", 1, 31.0),))
    assert Seen.of(json.loads(json.dumps(asdict(seen)))) == seen
