"""Ranks that measure this machine at the same time, as ranks of a run compute at the same time.

Each one traces steps of small jobs, and runs the operations of these again. Then the ranks make collectives and steps
together. Nothing here interprets the measurements.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from shardwright.common.json_text import strict_json
from shardwright.planner import Kernel, Kind, Point, table_of, work_of
from shardwright.planner.tracing import Operation, Timer, noting, time_collectives
from shardwright.train.config import Config
from shardwright.train.data.dataset import Dataset
from shardwright.train.errors import UserError
from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.world import World
from shardwright.train.planning.absent_data import AbsentData
from shardwright.train.planning.programs import traced_program
from shardwright.train.planning.small_jobs import Task, configured
from shardwright.train.step.trainer import Trainer

PASSES = 3  #: over all operations
WARM, STEPS = 3, 12  #: steps of small jobs
TIMEOUT = timedelta(minutes=10)


def measured_by_ranks(task: Task, ranks: int, kind: Kind) -> list[dict[str, Any]]:
    """Return the measurements of each rank.

    Raises:
        UserError: a rank has failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _one_thread(kind):
        processes = [
            context.Process(target=_rank, args=(task, rank, ranks, kind, folder), daemon=True)
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            while any(process.is_alive() for process in processes):
                for process in processes:
                    process.join(0.1)
                if any(process.exitcode for process in processes):
                    break
        finally:
            for process in processes:
                process.kill()
        for rank, process in enumerate(processes):
            process.join()
            if process.exitcode and (error := Path(folder, f"{rank}.error")).exists():
                raise UserError(f"calibrate: rank {rank} failed: {error.read_text()}")
        if failed := [rank for rank, process in enumerate(processes) if process.exitcode]:
            raise UserError(f"calibrate: rank {failed[0]} ended with status {processes[failed[0]].exitcode}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


@contextmanager
def _one_thread(kind: Kind) -> Iterator[None]:
    """Processes that start inside the context compute in one thread on the CPU."""
    before = os.environ.get("OMP_NUM_THREADS")
    if kind == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _rank(task: Task, rank: int, ranks: int, kind: Kind, folder: str) -> None:
    try:
        measurements = measure(task, rank, ranks, kind, folder)
        Path(folder, f"{rank}.json").write_text(strict_json(measurements))
    except BaseException as error:
        Path(folder, f"{rank}.error").write_text(f"{type(error).__name__}: {' '.join(str(error).split())}")
        sys.exit(1)


def measure(
    task: Task, rank: int, ranks: int, kind: Kind, folder: str, timer: Timer | None = None
) -> dict[str, Any]:
    """Return the measurements of one rank: of operations, collectives and steps, each in every pass."""
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    if kind == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    operations: dict[Kernel, Operation] = {}
    without: set[str] = set()
    steps: list[list[float]] = []
    for values in task.operations:
        traced_program(configured(values, ranks), ranks, kind, lambda recorder: noting(recorder, operations))
    dist.init_process_group(
        "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.FileStore(str(Path(folder, "store")), ranks), rank=rank, world_size=ranks, timeout=TIMEOUT,
    )  # fmt: skip
    timer = timer or Timer(device)
    tables: dict[str, dict[Point, list[float]]] = defaultdict(dict)
    collectives: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for _ in range(PASSES):
        for kernel, operation in operations.items():
            seconds = timer.operation(operation)
            if seconds is None:
                without.add(kernel.name)
            else:
                table, point = table_of(kernel, work_of(kernel))
                tables[table].setdefault(point, []).append(seconds)
        if ranks > 1:
            time_collectives(task.sizes, device, timer, collectives)
        steps.append([_step(configured(values, ranks), rank, ranks, device) for values in task.steps])
    dist.barrier()
    dist.destroy_process_group()
    return {
        "kernels": [
            [table, list(point), seconds]
            for table, points in tables.items()
            for point, seconds in points.items()
        ],
        "collectives": [
            [name, nbytes, seconds]
            for name, sizes in collectives.items()
            for nbytes, seconds in sizes.items()
        ],
        "without": sorted(without),
        "steps": [list(each) for each in zip(*steps, strict=True)],
    }


def _step(config: Config, rank: int, ranks: int, device: torch.device) -> float:
    """Return the seconds of the host for a step of a small job."""
    world = World.of(config.parallel, rank, ranks, device)
    trainer = Trainer(config, world, cast(Dataset, AbsentData.of(config, ranks)), reads_weights=False)
    # With a GPU another thread makes the backward.
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    samples = []
    try:
        for _ in range(WARM + STEPS):
            begin = clock()
            trainer.train_step(StopRequest())
            samples.append(clock() - begin)
    finally:
        trainer.close()
    return statistics.median(samples[WARM:])
