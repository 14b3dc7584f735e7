"""The settings that `shardwright plan --fit` chooses beside others that run: random small jobs on two ranks.

    shardwright calibrate --out mine.toml
    python -m benchmarks.fit mine.toml

Each problem is a Llama of random size with a limit of memory, between that of its smallest and of its largest plan. Of
the settings that fit the limit by their plan, the chosen one and up to 11 random others run, a step of each in turn. A
row has:

chosen:  milliseconds of a step with the chosen settings, of the slower rank, on the clock: the median over the steps
fastest: the same of the fastest settings that ran
ratio:   chosen / fastest
place:   of the chosen settings among those that ran, by time
planned: milliseconds of the chosen settings by their plan
memory:  the most bytes of a step with the chosen settings, as a part of the bytes that the plan reserves
order:   the rank correlation of planned and real times of the settings (Spearman)
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import itertools
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.two_ranks import RANKS, Measure, of_both, trainer_of
from shardwright.engine.compat.dtensor import local_of
from shardwright.planner.allocator import Rules
from shardwright.planner.devices import Device, parse_devices
from shardwright.planner.search import Found, Keys, fastest
from shardwright.planner.verdict import runtime_of
from shardwright.train.commands.plans import fit, grids
from shardwright.train.commands.plans.planned_job import PlannedJob
from shardwright.train.config import Config
from shardwright.train.config.load import checked_config
from shardwright.train.launch.signals import StopRequest
from shardwright.train.step.trainer import Trainer
from tests.train.planning.kit import peak_of, tensors_in

SETTINGS = 12
ROUNDS, SECONDS = 5, 6.0  #: steps of each of the settings: at least so many, and of all together so long


@dataclass(frozen=True)
class Problem(PlannedJob):
    """A job of tables in memory, as JSON."""

    tables: str = "{}"

    def __call__(self, keys: Sequence[tuple[str, str]] = ()) -> Config:
        tables = copy.deepcopy(json.loads(self.tables))
        return checked_config(tables, self.name, [*self.keys, *keys], ranks=RANKS)


def problem(number: int) -> Problem:
    """A random job."""
    draw = random.Random(number)
    dim = 32 * draw.randint(3, 14)
    heads = dim // 32
    seq_len = 32 * draw.randint(2, 10)
    model = {
        "kind": "llama", "dim": dim, "n_layers": draw.randint(2, 8), "n_heads": heads,
        "n_kv_heads": draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "ffn_dim": 32 * draw.randint(dim // 16, dim // 10), "vocab_size": 256 * draw.randint(2, 24),
        "max_seq_len": 2048,
    }  # fmt: skip
    batch = draw.choice([4, 8, 16] if dim * seq_len < 50_000 else [4, 8])
    tables = {
        "model": model,
        "data": {"workers": 0},
        "train": {"steps": 1000, "seq_len": seq_len, "micro_batch": 1, "global_batch": batch},
    }
    if draw.random() < 0.3:
        tables["parallel"] = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    words = f"{model['n_layers']} x {dim}, vocabulary {model['vocab_size']}, {batch} x {seq_len}"
    return Problem(words, (("train.compile", "none"),), RANKS, tables=json.dumps(tables))


@dataclass(frozen=True)
class Choice:
    """The settings of a problem that run: the chosen one first."""

    problem: Problem
    limit: int
    settings: list[Found]
    plans: int


def choice(device: Device, number: int) -> Choice:
    """Search the settings of a problem, and draw others that fit."""
    job, rules, draw = problem(number), Rules(), random.Random(-number)
    made = [each for keys in settings_of(job) if isinstance(each := _planned(job, device, keys), Found)]
    sizes = sorted(each.nbytes for each in made)
    limit = int(sizes[0] + draw.uniform(0.1, 1.0) * (sizes[-1] - sizes[0]))
    limited = dataclasses.replace(device, nbytes=RANKS * (limit + runtime_of(RANKS, device.kind)[1]))
    plans = fit.search(job, limited, rules).plans
    best = fastest(plans)
    assert best is not None, f"problem {number}: nothing fits"
    config = job()
    chosen = {key: str(config.value_at(key)) for key, _ in made[0].keys} | dict(best.keys)
    others = [each for each in made if each.nbytes <= limit and dict(each.keys) != chosen]
    drawn = draw.sample(others, min(SETTINGS - 1, len(others)))
    return Choice(job, limit, [best._replace(keys=tuple(chosen.items())), *drawn], len(plans))


def settings_of(job: Problem) -> Iterator[Keys]:
    """All points of the grid of a search."""
    for axes in grids.axes_of(job(), RANKS, RANKS, dict(job.keys)):
        for values in itertools.product(*(axis.values for axis in axes)):
            yield tuple(pair for keys in values for pair in keys)


def _planned(job: Problem, device: Device, keys: Keys) -> Found | None:
    made = fit.planned(job, device, Rules(), True, keys)
    return made[0] if isinstance(made, tuple) else None


def measuring() -> Measure:
    return measure


def measure(rank: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """The steps of each problem on one rank: seconds of each of the settings, and the bytes of the chosen ones."""
    found: dict[str, Any] = {}
    for number, each in enumerate(choices):
        trainers = [trainer_of(each.problem(setting.keys), rank) for setting in each.settings]
        for trainer in trainers:
            trainer.train_step(StopRequest())
        nbytes = _kept(trainers[0]) + peak_of(functools.partial(trainers[0].train_step, StopRequest()))
        times: list[list[float]] = [[] for _ in trainers]
        began, going = time.monotonic(), torch.ones(1)
        while going.item():
            for trainer, own in zip(trainers, times, strict=True):
                dist.barrier()
                before = time.perf_counter()
                trainer.train_step(StopRequest())
                own.append(time.perf_counter() - before)
            going.fill_(len(times[0]) < ROUNDS or time.monotonic() - began < SECONDS)
            dist.broadcast(going, 0)
        for trainer in trainers:
            trainer.close()
        del trainers, trainer
        gc.collect()
        found[str(number)] = {"nbytes": nbytes, "times": times}
        if rank == 0:
            print(f"{each.problem.name}: {len(times[0])} rounds of {len(times)} settings", flush=True)
    return found


def _kept(trainer: Trainer) -> int:
    """Bytes of the parameters and of the optimizer's state on this rank."""
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    tensors += [each for state in trainer.optimizer.state.values() for each in tensors_in(state)]
    local = [local_of(each) if isinstance(each, DTensor) else each for each in tensors]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in local}.values())


def correlation(planned: Sequence[float], real: Sequence[float]) -> float:
    """The rank correlation of two rows."""
    ranks = [[sorted(row).index(each) for each in row] for row in (planned, real)]
    try:
        return statistics.correlation(*ranks)
    except statistics.StatisticsError:  # of one setting, or of settings that take equally long
        return 1.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", help="the file of `shardwright calibrate`")
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first problem")
    parser.add_argument("--plan-only", action="store_true", help="keep the plans, which later calls find")
    parser.add_argument("--json", help="a file for the times of all steps")
    options = parser.parse_args()
    _, device = parse_devices(options.device, lambda: None)  # type: ignore[arg-type, return-value]
    numbers = range(options.first, options.first + options.problems)
    with ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn")) as pool:
        choices = list(pool.map(functools.partial(choice, device), numbers))
    if options.plan_only:
        return
    of_ranks = of_both(measuring, choices)
    if options.json:
        settings = [[each._asdict() for each in one.settings] for one in choices]
        Path(options.json).write_text(json.dumps({"settings": settings, "ranks": of_ranks}))
    print(f"{device.name}, {platform.machine()}, {device.source}; load {os.getloadavg()[0]:.1f}")
    heads = {"chosen": 7, "fastest": 7, "ratio": 6, "place": 8, "planned": 8, "memory": 7, "order": 6}
    print(f"{'problem':40}", *(f"{head:>{width}}" for head, width in heads.items()))
    ratios, fits = [], 0
    for number, each in enumerate(choices):
        ranks = [of_rank[str(number)] for of_rank in of_ranks]
        of_settings = zip(*(rank["times"] for rank in ranks), strict=True)
        real = [max(map(statistics.median, both)) for both in of_settings]
        nbytes, best = max(rank["nbytes"] for rank in ranks), each.settings[0]
        ratios.append(real[0] / min(real))
        fits += nbytes <= best.nbytes
        place = f"{sorted(real).index(real[0]) + 1} of {len(real)}"
        order = correlation([setting.seconds for setting in each.settings], real)
        print(
            f"{each.problem.name:40} {real[0] * 1e3:7.1f} {min(real) * 1e3:7.1f} {ratios[-1]:6.3f} {place:>8} "
            f"{best.seconds * 1e3:8.1f} {nbytes / best.nbytes:7.3f} {order:6.2f}"
        )
        if ratios[-1] > 1.15:
            best = each.settings[real.index(min(real))]
            print(
                f"  chosen: {each.settings[0].keys}\n  faster: {best.keys}, planned {best.seconds * 1e3:.1f}"
            )
    near = sum(ratio <= 1.15 for ratio in ratios)
    print(
        f"{near} of {len(ratios)} within 15% of the fastest, the median {statistics.median(ratios) - 1:.1%}, the most "
        f"{max(ratios) - 1:.1%}; {fits} of {len(ratios)} within their predicted memory"
    )


if __name__ == "__main__":
    main()
