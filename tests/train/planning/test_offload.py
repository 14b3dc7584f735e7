"""Plans with offload: what the host has and what the device has, beside plans without it and real steps."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.planner.devices import known_devices
from shardwright.planner.program import HOST, Kernel, Program
from shardwright.planner.verdict import judge
from shardwright.tracing.loop import program_of_loop
from shardwright.train.planning import program_of
from tests.support.matrix import generate
from tests.support.pool import WorkerPools, run_case
from tests.support.sim.building import reason_to_skip
from tests.train.planning.kit import config_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def kept(program: Program) -> dict[tuple[str, bool], int]:
    """Bytes at the end, by group and by whether the host has them."""
    found: dict[tuple[str, bool], int] = {}
    for each in program.live():
        key = program.owners[each.owner].group, each.on_host
        found[key] = found.get(key, 0) + each.nbytes
    return found


HANDFUL: dict[str, str] = {
    "cpu": "parallel.offload=cpu",
    "optimizer": "parallel.offload=optimizer",
}
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


@pytest.mark.parametrize("words", HANDFUL.values(), ids=HANDFUL)
def test_the_host_has_what_is_offloaded(words: str) -> None:
    check(words)


@pytest.mark.extensive("each setting")
@pytest.mark.parametrize("words", ROWS)
def test_the_host_has_what_is_offloaded_with_each_setting(words: str) -> None:
    check(words)


def test_a_verdict_with_offload() -> None:
    plain, offloaded = (
        judge(program_of(config_of(words), 2), known_devices()["h100"], 2)
        for words in ("", "parallel.offload=cpu")
    )
    assert offloaded.exact["optimizer"] == 0 and offloaded.host["optimizer"] == plain.exact["optimizer"]
    assert offloaded.host["gradients"] and offloaded.usage.reserved < plain.usage.reserved
    line = str(offloaded).splitlines()[-1]
    assert line.startswith("host") and "memory of the host" in line


def test_the_host_steps_what_is_on_the_host() -> None:
    program = program_of(config_of("parallel.offload=cpu"), 2)
    steps = {each.stream for each in program.events if isinstance(each, Kernel) and "adamw" in each.name}
    copies = {each.stream for each in program.events if isinstance(each, Kernel) and "copy" in each.name}
    assert steps == {HOST}
    assert {"upload", "download"} <= copies


# -- beside steps on the simulated device, which has memory of its own

WIDTH = 128
TRUE_AXES: dict[str, tuple[Any, ...]] = {
    "offload": ("cpu", "optimizer", "none"),
    "strategy": ("zero3", "zero2", "zero1", "ddp"),
    "layout": ("per_parameter", "ragged"),
    "dtype": (None, torch.bfloat16),
    "in_backward": (False, True),
    "micro_batches": (1, 2),
}
TRUE_ROWS = generate(TRUE_AXES, lambda *_: False, 2)


def loop_of(
    row: dict[str, Any], mesh: Callable[[], Any], begins: Callable[[int], object] = id
) -> Callable[[], object]:
    """The loop of a row, on the device of its mesh. `begins` is called before each step."""

    def loop() -> object:
        there = mesh()
        device = torch.device(there.device_type)
        with_weights = row["offload"] == "cpu"
        policy = sw.Offload(with_weights, with_weights, row["offload"] != "none", False)
        options: dict[str, Any] = {
            "mesh": there, "strategy": row["strategy"], "layout": row["layout"], "offload_policy": policy,
            "mp_policy": sw.MixedPrecisionPolicy(param_dtype=row["dtype"], reduce_dtype=torch.float32),
        }  # fmt: skip
        with sw.deferred_init():
            model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
        for layer in model:
            sw.fully_shard(layer, **options)
        sw.fully_shard(model, **options)
        sw.materialize(model)
        wrap: Any = sw.optim.in_backward if row["in_backward"] else sw.fully_shard_optimizer
        optimizer = wrap(torch.optim.AdamW(model.parameters(), foreach=False))
        for step in range(3):
            begins(step)
            for number in range(row["micro_batches"]):
                model.set_requires_gradient_sync(number + 1 == row["micro_batches"])
                output = model(torch.zeros(1024, WIDTH, device=device, requires_grad=True))
                output.sum().backward()
                del output
            optimizer.step()
            optimizer.zero_grad()
        begins(3)
        return model, optimizer

    return loop


def measure(rank: int, world_size: int, row: dict[str, Any], folder: Path) -> None:
    """Write the bytes of the device's memory at the begin and the peak of the third step."""
    from tests.support.sim import load

    sim = load()
    sim.join_groups()
    figures: list[int] = []

    def begins(step: int) -> None:
        torch.get_device_module("sim").synchronize()
        gc.collect()
        if step == 2:
            figures.append(sim.extension.memory_allocated())
            sim.extension.reset_peak_memory_stats()
        elif step == 3:
            figures.append(sim.extension.max_memory_allocated())

    mesh = torch.distributed.device_mesh.init_device_mesh
    loop_of(row, lambda: mesh("sim", (world_size,)), begins)()
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))


def power(nbytes: int) -> int:
    """The size of a block of the simulated device."""
    return max(512, 1 << (nbytes - 1).bit_length())


@pytest.mark.extensive("each setting")
@pytest.mark.skipif(reason_to_skip() is not None, reason=reason_to_skip() or "")
@pytest.mark.usefixtures("sim_library")
@pytest.mark.parametrize("row", TRUE_ROWS, ids=str)
def test_a_plan_has_the_peak_of_a_device_with_memory_of_its_own(
    row: dict[str, Any], worker_pools: WorkerPools, tmp_path: Path
) -> None:
    run_case(worker_pools, measure, 2, 240, pool_name="sim", row=row, folder=tmp_path)
    begin, peak = json.loads((tmp_path / "figures.json").read_text())
    mesh = torch.distributed.device_mesh.init_device_mesh
    program = program_of_loop(loop_of(row, lambda: mesh("cpu", (2,))), 2)
    events = [each._replace(nbytes=power(each.nbytes)) if hasattr(each, "nbytes") and hasattr(each, "block")
              else each for each in program.events]  # fmt: skip
    rounded = Program(events, program.owners)
    planned = rounded.peak().nbytes
    assert abs(planned - peak) <= 0.005 * peak, f"{planned} bytes planned, {peak} measured from {begin}"
