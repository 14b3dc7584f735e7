"""Plans of jobs whose activations wait in the host's memory: what the device has no longer, what the host has, and when
the copies run, beside plans without it and real steps."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch

from shardwright.comm.streams import use_streams
from shardwright.planner.devices import known_devices
from shardwright.planner.program import Alloc, Kernel, Program
from shardwright.planner.verdict import judge
from shardwright.planner.work import work_of
from shardwright.tracing import trace as tracing
from shardwright.tracing.recorder import Recorder
from shardwright.tracing.streams import RecordedStreams
from shardwright.train.planning.programs import composed_program, program_of, traced_program
from tests.train.planning.kit import config_of, plain, planned_step, real_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LAYERS = 6
#: Of an example whose blocks have inputs of 4 x 256 tokens with 128 float32 numbers.
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
    assert "activations" in str(verdict).splitlines()[-1]
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
    config = config_of(f"model.n_layers=20 validation.every=0 activations.{words}")
    composed = composed_program(config, 2)
    assert composed is not None
    assert plain(composed) == plain(traced_program(config, 2))


# -- beside real steps, in which the CPU has the device's memory and the host's


def compare(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of the host's memory and the device's together, with the kernels of the CPU."""
    config = config_of(f"validation.every=0 {words}")
    with use_streams(torch.device("cpu"), RecordedStreams(Recorder())):
        real, _ = real_step(config)
    monkeypatch.setattr(tracing, "kernels_of_cuda", nullcontext)
    together = [
        each._replace(stream="") if isinstance(each, Alloc) else each for each in program_of(config, 2).events
    ]
    planned, _ = planned_step(Program(together, program_of(config, 2).owners))
    assert abs(planned - real) <= 0.001 * real, f"{planned} bytes planned, {real} measured"


def test_host_and_device_have_together_the_peak_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compare("activations.offload=blocks", monkeypatch)


@pytest.mark.extensive("each setting")
@pytest.mark.parametrize(
    "words",
    [
        "activations.checkpoint=full activations.offload=inputs",
        "activations.checkpoint=ops activations.offload=blocks",
        "activations.offload=blocks parallel.param_dtype=bfloat16 parallel.layout=ragged train.micro_batch=2",
        "activations.offload=blocks parallel.strategy=zero1 parallel.memory=arena",
        "activations.offload=blocks parallel.offload=cpu",
    ],
)
def test_host_and_device_have_together_the_peak_of_the_step_with_each_setting(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(words, monkeypatch)
