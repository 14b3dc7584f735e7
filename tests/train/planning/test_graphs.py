"""Plans of steps in a CUDA graph, beside plans of the same steps without one."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import shardwright as sw
from shardwright.planner import STEP, VALIDATION, Alloc, Kernel, Program
from shardwright.planner.allocator import replay
from shardwright.planner.program import GRAPH, Event, Mark, Wait
from shardwright.planner.tracing.loop import program_of_loop
from shardwright.train.planning.programs import composed_program, traced_program
from tests.train.planning.kit import config_of, plain

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SETTINGS = [
    "", "parallel.memory=arena", "train.micro_batch=2 train.accumulate=hold activations.checkpoint=full",
    "parallel.strategy=zero1 parallel.param_dtype=bfloat16 parallel.reduce_dtype=float32",
]  # fmt: skip


def steps_of(program: Program) -> list[list[Event]]:
    starts = [i for i, name in program.phase_starts() if name in (STEP, VALIDATION)]
    return [program.events[first:stop] for first, stop in itertools.pairwise(starts)]


def work(events: list[Event]) -> Counter[Kernel]:
    """The kernels, on any stream: without a graph the computation is on another one."""
    return Counter(
        each._replace(stream="")
        for each in events
        if isinstance(each, Kernel) and each.name != "empty"  # the block of a plan, in the second step
    )


@pytest.mark.extensive("a trace of each", but=("",))
@pytest.mark.parametrize("words", SETTINGS)
def test_a_graph_does_the_work_of_a_step_in_memory_of_its_own(words: str) -> None:
    without = traced_program(config_of(words), 2)
    program = traced_program(config_of(f"{words} train.cuda_graph=true"), 2)
    assert program.has_graph and not without.has_graph
    *_, plain_step = steps_of(without)
    *warm_ups, captured, replayed = steps_of(program)
    assert len(warm_ups) == 3
    for step in warm_ups[1:]:
        assert work(step) == work(plain_step)
    samples = {("clone", "int64"), ("copy_", "int64")}  # into the memory that the graph reads
    for step in (captured, replayed):
        assert not work(plain_step) - work(step)
        assert {(each.name, each.dtype) for each in work(step) - work(plain_step)} <= samples

    streams = [{each.stream for each in step if isinstance(each, Alloc)} for step in (captured, replayed)]
    assert any(stream.startswith(GRAPH) for stream in streams[0])
    assert streams[1] <= {"compute"}  # the optimizer's, and what clipping needs
    taken = sum(isinstance(each, Alloc) for each in replayed)
    assert taken < sum(isinstance(each, Alloc) for each in plain_step) / 2

    number = 0
    for each in program.events:
        if isinstance(each, Mark):
            number += 1
            assert each.number == number
        elif isinstance(each, Wait):
            assert 0 < each.mark <= number

    peaks, plain_peaks = program.peaks(), without.peaks()
    assert plain_peaks["step"][0] <= peaks["step"][0] < 1.01 * plain_peaks["step"][0]  # with the inputs
    assert peaks["validation"][0] > plain_peaks["validation"][0]  # gradients are the graph's, and stay
    assert replay(program.events).peak.reserved > replay(without.events).peak.reserved


@pytest.mark.extensive("two traces")
@pytest.mark.parametrize("words", SETTINGS[2:])
def test_composed_plans_of_graphs_are_the_traced_ones(words: str) -> None:
    config = config_of(f"{words} train.cuda_graph=true model.n_layers=20")
    composed = composed_program(config, 2)
    assert composed is not None
    assert plain(composed) == plain(traced_program(config, 2))


def test_a_graph_in_a_loop() -> None:
    def loop() -> None:
        with sw.deferred_init():
            model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))
        for layer in model:
            sw.fully_shard(layer)
        sw.fully_shard(model)
        sw.materialize(model)
        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))

        def forward_and_backward(batch: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(model(batch), batch)
            loss.backward()
            return loss.detach()

        step = sw.GraphedStep(model, forward_and_backward)
        for _ in range(5):
            step(torch.zeros(64, 512))
            optimizer.step()
            optimizer.zero_grad()

    program = program_of_loop(loop, 2)
    of_graph = [each for each in program.events if isinstance(each, Alloc) and each.stream.startswith(GRAPH)]
    assert of_graph
    kept = {each.block for each in program.live()}
    assert any(each.block in kept for each in of_graph) and not all(each.block in kept for each in of_graph)
