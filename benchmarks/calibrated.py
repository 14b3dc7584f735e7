"""Planned times of steps beside real ones, after `shardwright calibrate`: 12 jobs on two ranks of this machine's CPU.

    shardwright calibrate --out mine.toml
    python -m benchmarks.calibrated mine.toml

No job has the sizes of those that `calibrate` measures. Each one runs in two processes of one thread, with random
tokens. A row has the steps of the slower rank, in milliseconds:

real:     of the rank's thread on its core, which other programs slow down less than the time on the clock: the median
          over the steps, as in the file
planned:  of the plan
ratio:    planned / real
anchored: the same, with times of the plan as much longer or shorter as operations of their kind take beside the steps
          than in the file
clock:    on the clock, the median, with waits for the other rank, and for other programs
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.two_ranks import RANKS, Measure, of_both, trainer_of
from shardwright.planner.devices import Device, parse_devices
from shardwright.planner.program import Kernel
from shardwright.planner.samples import steady
from shardwright.planner.speed import speed_of
from shardwright.planner.tracing.timing import Operation, Timer, noting
from shardwright.planner.work import work_of
from shardwright.train.launch.signals import StopRequest
from shardwright.train.planning.programs import program_of, traced_program
from shardwright.train.planning.small_jobs import ON_CPU, configured

SECONDS = 9.0  #: of steps of a job
LEAST, MOST = 9, 60  #: steps
#: Operations beside steps: name, dtype, the job of `calibrate` that has them, and the kind of work that they stand for.
ANCHORS = (
    ("mm", "float32", 1, "products"), ("mm", "float32", 3, "products"), ("mm", "bfloat16", 6, "bfloat16"),
    ("_scaled_dot_product_flash_attention_for_cpu", "float32", 3, "attention"),
    ("mul", "float32", 1, "memory"), ("mul", "float32", 3, "memory"), ("_fused_adamw_", "float32", 1, "optimizer"),
)  # fmt: skip
_BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def _job(
    dim: int, ffn: int, vocab: int, layers: int, heads: int, seq_len: int, batch: int, **others: Any
) -> dict[str, Any]:
    model = {
        "kind": "llama", "dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads // 2,
        "ffn_dim": ffn, "vocab_size": vocab, "max_seq_len": 2048,
    }  # fmt: skip
    train = {"steps": 1000, "seq_len": seq_len, "micro_batch": batch}
    return {"model": model, "train": train, "data": {"workers": 0}, **others}


JOBS: dict[str, dict[str, Any]] = {
    "128 wide, 4 layers": _job(128, 352, 768, 4, 4, 192, 4),
    "160 wide, 8 layers": _job(160, 448, 1536, 8, 5 * 2, 96, 2),
    "320 wide, 3 layers": _job(320, 896, 3072, 3, 10, 384, 1),
    "384 wide, 6 layers": _job(384, 1024, 1536, 6, 6, 256, 2),
    "448 wide, 2 layers": _job(448, 1216, 6144, 2, 14, 160, 6),
    "640 wide, 2 layers": _job(640, 1728, 3072, 2, 10, 192, 2),
    "320 wide, full": _job(320, 896, 3072, 3, 10, 384, 2, activations={"checkpoint": "full"}),
    "384 wide, ops": _job(384, 1024, 1536, 4, 6, 256, 2, activations={"checkpoint": "ops"}),
    "320 wide, ddp": _job(320, 896, 3072, 3, 10, 192, 1, parallel={"strategy": "ddp"}),
    "384 wide, zero2": _job(384, 1024, 1536, 6, 6, 128, 2, parallel={"strategy": "zero2"}),
    "384 wide, bfloat16": _job(384, 1024, 1536, 6, 6, 256, 2, parallel=_BF16),
    "640 wide, bfloat16": _job(640, 1728, 3072, 2, 10, 192, 2, parallel=_BF16),
}


def anchors() -> list[Operation]:
    """The largest operation of each name and dtype in a job of `calibrate`."""
    chosen = []
    for name, dtype, number, _ in ANCHORS:
        operations: dict[Kernel, Operation] = {}
        config = configured(ON_CPU.operations[number], RANKS)
        traced_program(config, RANKS, "cpu", functools.partial(noting, operations=operations))
        of = [each for kernel, each in operations.items() if (kernel.name, kernel.dtype) == (name, dtype)]
        chosen.append(max(of, key=lambda each: each.kernel.nbytes))
    return chosen


def factors(now: list[float], in_file: list[float], bfloat16: bool) -> dict[str, float]:
    """The time of operations beside a job, as a multiple of that in the file, by kind of work."""
    found: dict[str, list[float]] = {}
    for (*_, kind), a, b in zip(ANCHORS, now, in_file, strict=True):
        if kind == "bfloat16" or (kind == "products" and bfloat16):
            kind = "products" if (kind == "bfloat16") == bfloat16 else ""
        found.setdefault(kind, []).append(math.log(a / b))
    return {kind: math.exp(statistics.mean(each)) for kind, each in found.items()}


def measuring() -> Measure:
    return functools.partial(measure, anchors())  # which a process with a group cannot trace


def measure(beside: Sequence[Operation], rank: int, names: Sequence[str]) -> dict[str, Any]:
    """The times of steps, and of the operations beside them, on one rank by job."""
    timer = Timer(torch.device("cpu"), samples=3)
    found: dict[str, Any] = {}
    for name in names:
        trainer = trainer_of(configured(JOBS[name], RANKS), rank)
        own, clock, anchored = [], [], []
        for _ in range(3):
            trainer.train_step(StopRequest())
        began, steps = time.monotonic(), torch.zeros(1)
        while not steps.item():
            dist.barrier()
            before, wall = time.thread_time(), time.perf_counter()
            trainer.train_step(StopRequest())
            own.append(time.thread_time() - before)
            clock.append(time.perf_counter() - wall)
            if len(own) % 2:
                anchored.append([timer.operation(each) for each in beside])
            steps.fill_(len(own) >= LEAST and (time.monotonic() - began > SECONDS or len(own) >= MOST))
            dist.broadcast(steps, 0)
        trainer.close()
        found[name] = {"own": own, "clock": clock, "anchors": anchored}
        if rank == 0:
            print(f"{name}: {len(own)} steps", flush=True)
    return found


def rows(
    names: list[str], device: Device
) -> Iterator[tuple[str, float, float, float, float, tuple[float, ...]]]:
    """A row for each job: its name; real, planned, anchored and clock's seconds; and the planned range."""
    beside = anchors()
    of_ranks = of_both(measuring, names)
    figures = device.figures
    assert figures is not None and figures.measured is not None
    in_file = [figures.measured.seconds(each.kernel, work_of(each.kernel)) for each in beside]
    for name in names:
        real = max(steady(each[name]["own"]) for each in of_ranks)
        clock = max(statistics.median(each[name]["clock"]) for each in of_ranks)
        now = [
            steady([row[i] for each in of_ranks for row in each[name]["anchors"]])
            for i in range(len(ANCHORS))
        ]
        config = configured(JOBS[name], RANKS)
        speed = speed_of(program_of(config, RANKS, "cpu"), device, RANKS)
        assert speed is not None
        longer = factors(now, in_file, config.parallel.param_dtype == "bfloat16")
        busy = speed.timeline.busy
        rest = speed.seconds[1] - sum(busy.values())  # of the host, and of collectives
        anchored = sum(longer[kind] * seconds for kind, seconds in busy.items()) + longer["memory"] * rest
        yield name, real, speed.seconds[1], anchored, clock, speed.seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", help="the file of `shardwright calibrate`")
    parser.add_argument("--only", default="", help="jobs whose names have this text")
    parser.add_argument("--json", help="a file for all figures")
    options = parser.parse_args()
    _, device = parse_devices(options.device, lambda: None)  # type: ignore[arg-type, return-value]
    names = [name for name in JOBS if options.only in name]
    random.Random(0).shuffle(names)
    found = list(rows(names, device))
    print(f"{device.name}, {platform.machine()}, {device.source}; load {os.getloadavg()[0]:.1f}")
    print(f"{'job':20} {'real':>8} {'planned':>8} {'range':>17} {'ratio':>6} {'anchored':>8} {'clock':>8}")
    for name, real, planned, anchored, clock, (low, _, high) in sorted(found, key=lambda row: row[1]):
        print(
            f"{name:20} {real * 1e3:8.1f} {planned * 1e3:8.1f} {low * 1e3:8.1f}-{high * 1e3:<8.1f} "
            f"{planned / real:6.2f} {anchored / real:8.2f} {clock * 1e3:8.1f}"
        )
    for i, name in ((2, "planned"), (3, "anchored")):
        off = [max(row[i] / row[1], row[1] / row[i]) - 1 for row in found]  # type: ignore[operator]
        pairs = [(a, b) for a in found for b in found if a[1] > 1.1 * b[1]]
        wrong = sum(a[i] <= b[i] for a, b in pairs)  # type: ignore[operator]
        near = sum(each <= 0.15 for each in off)
        print(
            f"{name}: {near} of {len(off)} within 15%, the median {statistics.median(off):.0%}, the most "
            f"{max(off):.0%}; {wrong} of {len(pairs)} pairs that differ by 10% are in the wrong order"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
