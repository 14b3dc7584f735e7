"""Plans with offload, also of activations: what the host has and what the device has, beside plans without it and real
steps."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch

from shardwright.engine.comm import use_streams
from shardwright.planner import Alloc, Kernel, Program, judge, known_devices, speed_of, work_of
from shardwright.planner.program import HOST
from shardwright.planner.tracing import ProgramRecorder, tracer as tracing
from shardwright.planner.tracing.streams import RecordedStreams
from shardwright.train.planning.programs import composed_program, program_of, traced_program
from tests.support.matrix import generate
from tests.train.planning.kit import config_of, plain, planned_step, real_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def kept(program: Program) -> dict[tuple[str, bool], int]:
    """Bytes at the end, by group and by whether the host has them."""
    found: dict[tuple[str, bool], int] = {}
    for each in program.live():
        key = program.owners[each.owner].group, each.on_host
        found[key] = found.get(key, 0) + each.nbytes
    return found


AXES: dict[str, tuple[str, ...]] = {
    "offload": ("parallel.offload=cpu", "parallel.offload=optimizer"),
    "strategy": ("", "parallel.strategy=zero1", "parallel.strategy=zero2", "parallel.strategy=ddp",
                 "parallel.strategy=hsdp parallel.replicas=2"),
    "layout": ("", "parallel.layout=ragged", "parallel.layout=element"),
    "optimizer": ("", "optimizer.name=muon", "optimizer.name=adamw8bit",
                  "optimizer.in_backward=true train.max_norm=0"),
    "dtype": ("", "parallel.param_dtype=bfloat16"),
    "accumulate": ("", "train.micro_batch=2"),
    "memory": ("", "parallel.memory=arena"),
}  # fmt: skip
ROWS = [
    " ".join(filter(None, row.values()))
    for row in generate(
        AXES, lambda one, a, other, b: {a, b} == {"parallel.layout=element", "optimizer.name=adamw8bit"}, 2
    )
]


def check(words: str) -> None:
    """The host and the device have together what the device has without offload, each in its place."""
    config = config_of(f"train.global_batch=16 validation.every=0 {words}", ranks=4)
    parallel = config.parallel.model_copy(update={"offload": "none"})
    plain = kept(program_of(config.model_copy(update={"parallel": parallel}), 4))
    found = kept(program_of(config, 4))
    assert not any(on_host for _, on_host in plain)
    moved = ["optimizer", "parameters"] if config.parallel.offload == "cpu" else ["optimizer"]
    for group in ("parameters", "optimizer"):
        here, there = found.get((group, False), 0), found.get((group, True), 0)
        assert here + there == plain[group, False], group
        # Tables of positions are buffers, which stay.
        assert (there > 0.7 * plain[group, False]) == (group in moved), group
        if group == "optimizer" and config.optimizer.name == "adamw":
            # Beside parameters on the device are the counters of steps.
            assert here < 5000 if config.parallel.offload == "optimizer" else not here


def test_the_host_has_what_is_offloaded() -> None:
    check("parallel.offload=cpu")


@pytest.mark.extensive("each setting")
@pytest.mark.parametrize("words", ROWS)
def test_the_host_has_what_is_offloaded_with_each_setting(words: str) -> None:
    check(words)


def test_a_verdict_with_offload() -> None:
    program = program_of(config_of("parallel.offload=cpu validation.every=0"), 2)
    verdict = judge(program, known_devices()["h100"], 2)
    assert (
        verdict.exact["optimizer"] == 0 and verdict.host["optimizer"] == 2 * verdict.host["parameters"] + 156
    )
    assert verdict.host["gradients"] >= verdict.host["parameters"]
    line, need = str(verdict).splitlines()[-2:]
    assert line.startswith("host") and "memory of the host" in line and "for the 2 ranks of a node" in need
    steps = {each.stream for each in program.events if isinstance(each, Kernel) and "adamw" in each.name}
    copies = {each.stream for each in program.events if isinstance(each, Kernel) and "copy" in each.name}
    assert steps == {HOST} and {"upload", "download"} <= copies


def test_offload_takes_time() -> None:
    """The optimizer's state crosses in each step, and with ``cpu`` the host steps."""
    losses: dict[str, dict[str, float]] = {}
    seconds = {}
    kernels = {}
    for offload in ("none", "optimizer", "cpu"):
        program = program_of(config_of(f"parallel.offload={offload} validation.every=0"), 2)
        speed = speed_of(program, known_devices()["h100"], 2)
        assert speed is not None
        losses[offload] = {each.name: each.seconds for each in speed.losses()}
        seconds[offload] = speed.seconds[1]
        assert sum(losses[offload].values()) == pytest.approx(speed.seconds[1])
        begin, end = program.last_step()
        kernels[offload] = [each for each in program.events[begin:end] if isinstance(each, Kernel)]
    assert losses["none"]["copies"] == losses["none"]["offloaded"] == losses["optimizer"]["offloaded"] == 0
    assert losses["optimizer"]["copies"] > 0 < losses["cpu"]["offloaded"]
    assert seconds["none"] < min(seconds["optimizer"], seconds["cpu"])
    weights = sum(each.nbytes for each in kernels["cpu"] if each.name == "_fused_adamw_") / 16
    crossing = {
        offload: sum(work_of(each).nbytes for each in each_of if work_of(each).kind == "copies")
        for offload, each_of in kernels.items()
    }
    # Two numbers of state for each weight, up and down. With ``cpu`` gradients go down, and weights come up for
    # forward, most of them again for backward.
    assert crossing["none"] == 0 and crossing["optimizer"] == pytest.approx(4 * 4 * weights, rel=0.01)
    assert 2 * 4 * weights < crossing["cpu"] < 3 * 4 * weights


def test_muon_on_the_device_reads_the_host() -> None:
    program = program_of(config_of("parallel.offload=cpu validation.every=0 optimizer.name=muon"), 2)
    begin, end = program.last_step()
    crossing = {
        each.stream
        for each in program.events[begin:end]
        if isinstance(each, Kernel) and work_of(each).kind == "copies"
    }
    assert crossing == {"upload", "download", "compute"}


# -- activations

LAYERS = 6
#: The bytes of a block's input in the example: 4 x 256 tokens with 128 float32 numbers.
INPUT = 4 * 256 * 128 * 4


@functools.cache
def program(words: str) -> Program:
    return program_of(config_of(f"model.n_layers={LAYERS} validation.every=0 {words}"), 2)


def peaks(words: str) -> tuple[int, int]:
    """Bytes at the peaks of the steps, of the device and of the host."""
    return program(words).peaks()["step"]


def test_the_device_has_two_blocks_and_the_host_the_others() -> None:
    all_on_device, nothing = peaks("")
    on_device, on_host = peaks("activations.offload=blocks")
    assert nothing == 0
    verdict = judge(program("activations.offload=blocks"), known_devices()["h100"], 2)
    assert verdict.host == {"activations": on_host}
    assert "activations" in str(verdict).splitlines()[-2]
    # Buffers have powers of two as sizes, so the host has up to twice as many bytes as the device had.
    gone = all_on_device - on_device
    assert (LAYERS - 3) / (LAYERS - 1) / 2 * on_host < gone < on_host


def test_inputs_of_recomputed_blocks() -> None:
    on_device, on_host = peaks("activations.checkpoint=full activations.offload=inputs")
    assert on_host == (LAYERS - 1) * INPUT
    without, _ = peaks("activations.checkpoint=full")
    assert on_device < without
    _, on_host = peaks("activations.checkpoint=layers activations.offload=inputs")
    assert on_host == (LAYERS // 2 - 1) * INPUT


def test_copies_run_on_streams_of_their_own() -> None:
    words = "activations.checkpoint=full activations.offload=inputs"
    begin, end = program(words).last_step()
    copies: dict[str, int] = {}
    for each in program(words).events[begin:end]:
        if isinstance(each, Kernel) and work_of(each).kind == "copies":
            copies[each.stream] = copies.get(each.stream, 0) + work_of(each).nbytes
    assert copies == dict.fromkeys(("store", "fetch"), (LAYERS - 1) * INPUT)


@pytest.mark.extensive("two traces of each")
@pytest.mark.parametrize("words", ["offload=blocks", "checkpoint=full activations.offload=inputs"])
def test_a_composed_plan_is_the_traced_one(words: str) -> None:
    config = config_of(f"model.n_layers=24 validation.every=0 activations.{words}")
    composed = composed_program(config, 2)
    assert composed is not None
    assert plain(composed) == plain(traced_program(config, 2))


# -- beside real steps, in which the CPU has the device's memory and the host's


def is_measured(words: str) -> bool:
    """Whether rank 0 of two can make the steps alone: no all-to-all in which it sends nothing."""
    return "replicas" not in words and not ("element" in words and "muon" in words)


def compare_all(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of the host's memory and the device's together, with the kernels of the CPU."""
    config = config_of(f"validation.every=0 {words}")
    with use_streams(torch.device("cpu"), RecordedStreams(ProgramRecorder())):
        real, _ = real_step(config)
    monkeypatch.setattr(tracing, "kernels_of_cuda", nullcontext)
    program = program_of(config, 2)
    assert any(isinstance(each, Alloc) and each.on_host for each in program.events)
    together = [each._replace(stream="") if isinstance(each, Alloc) else each for each in program.events]
    planned, _ = planned_step(Program(together, program.owners))
    assert abs(planned - real) <= 0.001 * real, f"{planned} bytes planned, {real} measured"


def test_host_and_device_have_together_the_peak_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_all("parallel.offload=cpu", monkeypatch)


@pytest.mark.extensive("each setting")
@pytest.mark.parametrize("words", [row for row in ROWS if is_measured(row)])
def test_host_and_device_have_together_the_peak_of_the_step_with_each_setting(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_all(words, monkeypatch)


OF_ACTIVATIONS = [
    "activations.checkpoint=full activations.offload=inputs",
    "activations.checkpoint=ops activations.offload=blocks",
    "activations.offload=blocks parallel.param_dtype=bfloat16 parallel.layout=ragged train.micro_batch=2",
    "activations.offload=blocks parallel.strategy=zero1 parallel.memory=arena",
    "activations.offload=blocks parallel.offload=cpu",
    "activations.offload=blocks",
]


@pytest.mark.extensive("each setting", but=("activations.offload=blocks",))
@pytest.mark.parametrize("words", OF_ACTIVATIONS)
def test_host_and_device_have_together_the_peak_of_the_step_with_activations_on_the_host(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_all(words, monkeypatch)


def test_gradients_of_further_micro_batches_land_in_powers_of_two() -> None:
    """As torch's allocator of page-locked memory gives them. What stays has the bytes that it needs."""
    words = "train.global_batch=16 train.micro_batch=2 validation.every=0 parallel.offload=cpu"
    program = program_of(config_of(words, ranks=4), 4)
    found: dict[str, set[int]] = {}
    for each in program.events:
        if isinstance(each, Alloc) and each.on_host:
            found.setdefault(program.owners[each.owner].group, set()).add(each.nbytes)
    assert len(found["temporary"]) > 2 and all(nbytes.bit_count() == 1 for nbytes in found["temporary"])
    assert any(nbytes.bit_count() > 2 for nbytes in found["gradients"])
