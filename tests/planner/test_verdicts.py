"""Programs, devices and verdicts, without torch."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.common.json_text import strict_json
from shardwright.planner import (
    GIB,
    Alloc,
    Device,
    DeviceError,
    Free,
    Kernel,
    Owner,
    Phase,
    Program,
    Rules,
    as_values,
    judge,
    known_devices,
    parse_devices,
)
from shardwright.planner.allocator import CachingAllocator, run
from shardwright.planner.program import Event, HostWait, Mark, Wait

OWNERS = [Owner("parameters", "w", "", ""), Owner("activations", "", "mm float32 [2]", "model.py:3")]


def program(activation: int) -> Program:
    return Program(
        [
            Phase("build"), Alloc(0, 10 * GIB, "compute", 0), Phase("forward"), Alloc(1, activation, "compute", 1),
            Kernel("mm", "compute", 3, ((2, 3), (3, 4)), "float32"), Mark(1, "compute"), Wait("gather", 1), HostWait(1),
            Free(1), Phase("optimizer"),
        ],
        OWNERS,
    )  # fmt: skip


def none() -> Device:
    raise DeviceError("no GPU")


def test_the_peak_names_its_owner() -> None:
    peak = program(GIB).peak()
    assert (peak.nbytes, peak.phase, peak.owner) == (11 * GIB, "forward", OWNERS[1])
    assert peak.by_group() == {"parameters": 10 * GIB, "activations": GIB}
    with pytest.raises(ValueError, match="no allocation"):
        program(GIB).peak(9)


@pytest.mark.parametrize(
    "gib, answer, status", [(20, "yes", 0), (65.5, "barely", 0), (70, "no", 3), (400, "no", 3)]
)
def test_answers(gib: float, answer: str, status: int) -> None:
    verdict = judge(program(int(gib * GIB)), known_devices()["h100"], 8)
    assert (verdict.answer, verdict.status) == (answer, status)
    lines = str(verdict).splitlines()
    assert verdict.fits == (status == 0)
    assert all(len(line) < 120 for line in lines)
    assert lines[-1] == "peak     forward: mm float32 [2], model.py:3"
    assert ("are missing" in lines[0]) == (status == 3)
    figures = json.loads(strict_json(as_values(verdict)))
    assert figures["fits"] == answer
    assert figures["exact"]["parameters"] == 10 * GIB
    assert sum(figures["exact"].values()) + sum(figures["traced"].values()) == figures["live_bytes"]


def steps(*sizes: float, kept: float = 0.0, rest: float = 0.0, streams: str = "a") -> Program:
    """A program whose steps take and free blocks of these sizes in GiB one after another, on these streams in turn, and
    hold one from a step to the next. ``rest``: a block that a validation takes."""
    events: list[Event] = [Phase("build"), Alloc(0, 10 * GIB, "compute", 0)]
    block, last = 1, 0
    for _ in range(2):
        events += [Phase("step"), Phase("forward")]
        for size, stream in zip(sizes, itertools.cycle(streams)):
            events += [Alloc(block, int(size * GIB), stream, 1), Free(block)]
            block += 1
        if last:
            events.append(Free(last))
        if kept:
            events.append(Alloc(last := block, int(kept * GIB), "compute", 1))
            block += 1
        events += [Phase("optimizer"), Phase("after the optimizer")]
    events.append(Phase("validation"))
    if rest:
        events += [Alloc(block, int(rest * GIB), "compute", 1), Free(block)]
    if kept:
        events.append(Free(last))
    return Program(events, OWNERS)


def test_a_full_device_gives_its_cache_back() -> None:
    """The room of an H100 is 76.3 GiB: two blocks of 40 and 45 GiB do not fit beside each other and 10."""
    verdict = judge(steps(40, 45), known_devices()["h100"], 8)
    assert (verdict.answer, verdict.status) == ("barely", 0)
    assert verdict.unlimited.reserved == 95 * GIB
    assert verdict.usage.reserved == 55 * GIB < verdict.room
    assert verdict.usage.requested == verdict.peak.nbytes == 55 * GIB
    assert (verdict.retries, verdict.retries_each_step) == (1, 0)  # 45 serves both from then on
    assert verdict.left == verdict.room - 95 * GIB < 0
    lines = str(verdict).splitlines()
    assert lines[2].strip() == (
        "PyTorch's allocator empties its cache once, and not in later steps; the host waits for the GPU each time"
    )
    assert all(len(line) < 120 for line in lines)
    figures = json.loads(strict_json(as_values(verdict)))
    assert (figures["reserved_bytes"], figures["unlimited_reserved_bytes"]) == (55 * GIB, 95 * GIB)
    assert (figures["retries"], figures["retries_each_step"]) == (1, 0)


def test_a_cache_that_is_given_back_in_each_step() -> None:
    """Each of two streams needs 40 GiB in turn."""
    program = steps(40, 40, streams="ab")
    verdict = judge(program, known_devices()["h100"], 8)
    assert (verdict.answer, verdict.retries, verdict.retries_each_step) == ("barely", 3, 2)
    assert "empties its cache 2 times in each step; the host waits" in str(verdict)
    assert judge(program, known_devices()["b200"], 8).retries_each_step == 0
    assert judge(steps(40, 40, rest=70, streams="ab"), known_devices()["h100"], 8).answer == "no"
    assert judge(program, known_devices()["h100"], 8, Rules(fraction=0.6)).answer == "no"


def test_further_steps_are_as_the_last_one() -> None:
    program = steps(2, 3, kept=1)
    before, last, *further, rest = program.with_further_steps(2)
    assert [*before, *last, *rest] != program.events  # the block that is held has another number now
    assert len(further) == 2 and all(len(step) == len(last) for step in further)
    whole = Program([each for part in program.with_further_steps(2) for each in part], program.owners)
    numbers = [each.block for each in whole.events if isinstance(each, Alloc)]
    assert len(set(numbers)) == len(numbers)
    assert [each.block for each in whole.live()] == [0]
    assert whole.peak().nbytes == program.peak().nbytes
    assert [*itertools.chain(*program.with_further_steps(0))] == program.events


def test_steps_that_leave_more_than_they_find_have_no_further_ones() -> None:
    program = steps(2)
    program.events.insert(-4, Alloc(99, 5, "compute", 1))
    parts = list(program.with_further_steps(2))
    assert len(parts) == 3 and [*itertools.chain(*parts)] == program.events
    once = Program(program.events[:7], OWNERS)
    assert [*itertools.chain(*once.with_further_steps(2))] == once.events


def test_one_rank_needs_no_buffers_of_nccl() -> None:
    one, two = (judge(program(GIB), known_devices()["h100"], ranks) for ranks in (1, 2))
    assert one.left > two.left


def test_each_device_has_a_source() -> None:
    assert len(known_devices()) >= 6
    for device in known_devices().values():
        assert device.source.startswith("https://"), device
        assert 10 * GIB < device.nbytes < 300 * GIB, device


def test_devices_of_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "Mine"\ngib = 48\n')
    count, device = parse_devices(f"4x{path}", none)
    assert (count, device.name, device.nbytes) == (4, "Mine", 48 * GIB)
    assert parse_devices("H100", none)[0] == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("8xh10", "did you mean 8xh100"), ("0xh100", "at least 1"), ("", "NxDEVICE"), ("x", "NxDEVICE"),
        ("2x/nowhere/mine.toml", "cannot read"), ("-1xh100", "NxDEVICE"), ("8xlocal", "no GPU"),
    ],
)  # fmt: skip
def test_wrong_devices(text: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        parse_devices(text, none)


@pytest.mark.parametrize("text", ["gib = 'much'", "gib = true", "gib = -1", "", "name = "])
def test_wrong_files_of_devices(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(DeviceError, match=r"expected gib|cannot read"):
        parse_devices(str(path), none)


def test_torch_is_not_imported() -> None:
    code = "import sys, shardwright.planner.text, shardwright.planner.verdict; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_blocks_that_pass_in_a_phase_are_left_out() -> None:
    owners = [Owner("temporary", "", "draw", ""), Owner("parameters", "w", "", "")]
    events: list[Event] = [
        Phase("build"), Alloc(1, 100, "", 0), Alloc(2, 10, "", 1), Free(1), Phase("forward"), Alloc(5, 7, "", 0),
        Free(5), Free(2),
    ]  # fmt: skip
    expected = [Phase("build"), Alloc(1, 10, "", 0), Phase("forward"), Alloc(3, 7, "", 1), Free(3), Free(1)]
    found = Program(events, owners).without_passing("build")
    assert (found.events, found.owners) == (expected, owners[::-1])
    assert found.peak().nbytes == 17


def test_the_verdict_takes_the_largest_phase() -> None:
    owners = [*OWNERS, Owner("temporary", "", "logits", ""), Owner("staging", "", "parts", "")]
    events: list[Event] = [
        *program(GIB).events, Phase("validation"), Alloc(2, 3 * GIB, "compute", 2), Free(2), Phase("save"),
        Alloc(3, 5 * GIB - 7, "host", 3), Alloc(4, 9, "compute", 2), Free(4),
    ]  # fmt: skip
    verdict = judge(Program(events, owners), known_devices()["h100"], 1)
    assert (verdict.peak.nbytes, verdict.peak.phase) == (13 * GIB, "validation")
    # The copy of a save grows in steps, and is none of the device.
    assert verdict.host == {"staging": 5 * GIB} and verdict.usage.requested == 13 * GIB
    assert verdict.parts == {
        "step": (11 * GIB, 0), "validation": (13 * GIB, 0), "save": (10 * GIB + 9, 5 * GIB),
    }  # fmt: skip
    figures = json.loads(strict_json(as_values(verdict)))
    assert figures["phases"]["save"] == {"live_bytes": 10 * GIB + 9, "host_bytes": 5 * GIB}
    assert str(verdict).splitlines()[-3:] == [
        "phases   step 11.00, validation 13.00, save 10.00 GiB live at most",
        "host        5.00  staging 5.00; memory of the host for each rank",
        "         8.00 GiB for the rank of a node, with 3.00 for each process; the host has 2048.00",
    ]
    assert judge(program(GIB), known_devices()["h100"], 1).host == {}


def on_host(gib: float) -> Program:
    """A program that keeps so much in the memory of the host, and little on the device."""
    owner = Owner("activations", "activations of blocks", "", "")
    return Program([*program(GIB).events, Alloc(2, int(gib * GIB), "host", 2)], [*OWNERS, owner])


@pytest.mark.parametrize(
    "gib, ranks, answer",
    [
        (248, 8, "barely"), (254, 8, "no"), (240, 8, "yes"), (254, 7, "yes"), (254, 1, "yes"),
        (254, 64, "no"), (240, 64, "yes"), (2048, 1, "no"),
    ],
)  # fmt: skip
def test_the_ranks_of_a_node_share_the_memory_of_its_host(gib: float, ranks: int, answer: str) -> None:
    """A node of 8 devices has 2,048 GiB, and each process takes 3 beside what it keeps there."""
    verdict = judge(on_host(gib), known_devices()["h100"], ranks)
    assert verdict.answer == answer and verdict.needs_more_host == (answer == "no")
    assert verdict.host_need == min(ranks, 8) * int((gib + 3) * GIB)
    lines = str(verdict).splitlines()
    assert ("GiB of the host's memory are missing" in lines[0]) == (answer == "no")
    assert json.loads(strict_json(as_values(verdict)))["host_need_bytes"] == verdict.host_need


def test_the_memory_of_a_host_is_in_the_file_of_its_device(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    for text, answer, words in (
        ("gib = 80\nhost_gib = 100", "no", "the host has 100.00"),
        ("gib = 80", "yes", "how much the host has is not known (host_gib of the device's file)"),
        ('like = "h100"', "yes", "the host has 2048.00"),
        ('like = "h200"', "yes", "the host has 2048.00"),
    ):
        file.write_text(text + "\n")
        verdict = judge(on_host(50), parse_devices(f"8x{file}", none)[1], 8)
        assert verdict.answer == answer and str(verdict).splitlines()[-1].endswith(words)
    file.write_text("gib = 80\nhost_gib = -1\n")
    with pytest.raises(DeviceError, match="expected host_gib, the memory of a node's host in GiB, found -1"):
        parse_devices(str(file), none)


def test_later_steps_may_reserve_more_than_the_first_two() -> None:
    """Each step finds the block of the step before, which lies elsewhere in the cache than that of the first one."""
    mib = 1 << 20
    sizes = (22, 22, 11, 14, 11, 14)
    events: list[Event] = [Phase("build"), Alloc(0, 100 * mib, "compute", 0)]
    for first in (1, 7):
        blocks = range(first, first + 6)
        taken = [Alloc(block, size * mib, "compute", 1) for block, size in zip(blocks, sizes, strict=True)]
        kept = [Free(first - 1)] if first > 1 else []
        events += [Phase("step"), Phase("forward"), *taken[:2], *kept]
        for i in range(4):
            events += [*taken[2 + i : 3 + i], Free(first + i)]
        events.append(Free(first + 4))
    reserved = []
    for count in (0, 3):
        allocator = CachingAllocator(Rules())
        for each in Program(events, OWNERS).with_further_steps(count):
            run(allocator, each)
        reserved.append(allocator.peak.reserved)
    assert reserved == [170 * mib, 192 * mib]
    assert judge(Program(events, OWNERS), known_devices()["h100"], 1).unlimited.reserved == 192 * mib
