"""The picture of a step: its bytes are those of the program, its spans those of the replay, and it stays small."""

from __future__ import annotations

import itertools
import random

import pytest

from shardwright.planner import STEP, Alloc, Free, Kernel, Owner, Phase, Program, Rates, Step, record, replay
from shardwright.planner.program import Event
from shardwright.train.report.page.step import PARTS, step_picture, tensors_of
from tests.train.report.page.kit import H100, small_program, totals

assert H100.figures is not None


def drawn_program(seed: int, count: int = 400) -> Program:
    """A step with blocks that are taken and freed at random, of a few owners, between kernels."""
    draw = random.Random(seed)
    events: list[Event] = [
        Alloc(0, 1 << 20, "compute", 0),
        Phase(STEP),
        Phase("forward"),
        Phase(STEP),
        Phase("forward"),
    ]
    live = [0]
    for block in range(1, count):
        events.append(
            Alloc(
                block,
                draw.randint(1, 1 << 24),
                draw.choice(["compute", "compute", "host"]),
                draw.randrange(5),
            )
        )
        live.append(block)
        while live and draw.random() < 0.45:
            events.append(Free(live.pop(draw.randrange(len(live)))))
        events.append(Kernel("mul", "compute", draw.randint(1, 1 << 26), ((8,), (8,)), "float32"))
    return Program(events, [Owner("activations", f"u{i}", "mul float32 [8]", "") for i in range(5)])


@pytest.mark.parametrize("seed", range(5))
def test_its_bytes_are_those_of_the_program(seed: int) -> None:
    program = drawn_program(seed)
    first, stop = program.last_step()
    picture = step_picture(program, H100.figures, 1)
    allocs = [i for i in range(first, stop) if isinstance(e := program.events[i], Alloc) and not e.on_host]
    wanted = [sum(each.nbytes for each in program.live(i + 1) if not each.on_host) for i in allocs]
    found = [nbytes for nbytes, kind in zip(totals(picture), picture["taken"], strict=True) if kind >= 0]
    assert found == wanted
    assert max(totals(picture)) == program.peak(first).nbytes
    assert min(picture["times"]) >= 0 and sum(picture["times"]) <= PARTS


def test_small_blocks_are_drawn_together_and_count(seed: int = 3) -> None:
    program = drawn_program(seed)
    whole, few = (step_picture(program, H100.figures, 1, most) for most in (10_000, 60))
    assert sum(kind >= 0 for kind in few["taken"]) <= 60 < sum(kind >= 0 for kind in whole["taken"])
    assert few["small_bytes"] > 0 == whole["small_bytes"]
    assert set(totals(few)) <= set(totals(whole))


def test_its_spans_are_those_of_the_replay() -> None:
    program = small_program()
    rates = Rates.of(H100.figures, 8)
    spans = record(Step.of(program, with_memory=True), rates).spans
    picture = step_picture(program, H100.figures, 8)
    seconds = replay(Step.of(program), rates).seconds
    assert picture["unit_seconds"] * PARTS == pytest.approx(seconds)
    assert [each["name"] for each in picture["streams"]] == ["compute", "gather"]
    for stream in picture["streams"]:
        own = [each for each in spans if each.stream == stream["name"]]
        ends = [*itertools.accumulate(g + n for g, n in zip(stream["gaps"], stream["lengths"], strict=True))]
        assert ends == [round(each.end / picture["unit_seconds"]) for each in own]
    assert [name for name, _ in picture["phases"]] == [
        "step",
        "forward",
        "backward",
        "optimizer",
        "after the optimizer",
    ]
    starts = [at for _, at in picture["phases"]]
    assert starts == sorted(starts) and starts[-1] <= PARTS


def test_kernels_beside_each_other_are_joined_if_there_are_many() -> None:
    picture = step_picture(small_program(layers=40), H100.figures, 8, most=30)
    assert sum(len(each["kernels"]) for each in picture["streams"]) <= 30
    assert any(number < 0 for each in picture["streams"] for number in each["kernels"])


@pytest.mark.parametrize("steps", [1, 2])
def test_without_times_the_axis_counts_events(steps: int) -> None:
    """A device whose speed is not known, or a program of one step."""
    picture = step_picture(small_program(steps=steps), H100.figures if steps == 1 else None, 8)
    assert picture["unit_seconds"] is None and "streams" not in picture
    assert max(totals(picture)) == small_program().peak().nbytes


def test_tensors_of_a_peak_are_all_there() -> None:
    peak = small_program(layers=400).peak()
    rows = tensors_of(peak)
    assert sum(row["bytes"] for row in rows) == peak.nbytes and rows[-1]["unit"].endswith(" more owners")
    assert rows[0]["bytes"] == max(peak.by_owner.values())
