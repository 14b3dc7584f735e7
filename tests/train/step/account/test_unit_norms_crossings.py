"""Gradient norms by unit in generated jobs: strategies, tensor and context parallelism, adapters, accumulation.

The norms make the norm of the step, are equal on all ranks, and are those of a plain model on the whole global batch.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pydantic import ValidationError

from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.report.unit_norms import read_unit_norms
from tests.support import multirank
from tests.train.kit.jobs import config_file, records, tiny, train_here, train_step, trainer
from tests.train.kit.plain_norms import plain_norms

AXES: dict[str, list[dict[str, Any]]] = {
    "parallel": [
        *({"strategy": name} for name in ("ddp", "zero1", "zero2", "zero3")),
        {"strategy": "zero3", "reshard_after_forward": "never"},
        {"strategy": "zero3", "offload": "cpu"},
        {"strategy": "hsdp", "replicas": 2},
        {"strategy": "hfsdp", "replicas": 2},
        {"tensor": 2},
        {"context": 2},
        {"tensor": 2, "strategy": "zero1"},
        {"context": 2, "strategy": "zero2"},
    ],
    "layout": [{"layout": name} for name in ("per_parameter", "ragged", "element")],
    "finetune": [
        {},
        {"method": "lora", "rank": 2},
        {"method": "dora", "rank": 2, "train_also": ["*norm*"]},
        {"method": "lora", "rank": 2, "targets": ["layers.1.*"]},
    ],
    "train": [
        {"accumulate": accumulate, "micro_batch": size, "max_norm": limit}
        for accumulate in ("communicate", "hold")
        for size in (1, 2)
        for limit in (0.0, 0.01)
    ],
    "optimizer": [{}, {}, {"in_backward": True}],
}


def drawn(seed: int) -> Config | None:
    """A configuration; None if its settings do not go together."""
    draw = random.Random(seed)
    row = {axis: draw.choice(values) for axis, values in AXES.items()}
    try:
        return tiny(
            model={"n_kv_heads": 2},
            parallel={"engine": "shardwright", **row["parallel"], **row["layout"]},
            finetune=row["finetune"],
            train=row["train"] | ({"max_norm": 0.0} if row["optimizer"] else {}),
            optimizer=row["optimizer"],
            log={"unit_norms": 1},
        )
    except (ValidationError, UserError):
        return None


def check(config: Config, rank: int, world_size: int) -> None:
    job = trainer(config, rank, world_size)
    try:
        agreed = train_step(job).agreed
    finally:
        job.close()
    norms = agreed.unit_norms
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, dict(norms))
    assert all(each == everyones[0] for each in everyones)
    if config.optimizer.in_backward:
        assert agreed.norm is None and norms == {}
        return
    assert agreed.norm is not None
    # Both are made of the same float32 norms of parameters, the one in float32 and the other in float64.
    assert math.hypot(*norms.values()) == pytest.approx(agreed.norm, rel=1e-5)
    wanted = plain_norms(config)
    assert {unit for unit in norms if unit.startswith("layers.")} == {*wanted}
    for unit, norm in wanted.items():
        assert norms[unit] == pytest.approx(norm, rel=1e-4)  # sums over other groups of samples, in float32


def check_all(seeds: range, rank: int, world_size: int) -> None:
    wrong = []
    for seed in seeds:
        if (config := drawn(seed)) is None:
            continue
        try:
            check(config, rank, world_size)
        except Exception as error:
            sections = {
                name: getattr(config, name).model_dump(exclude_unset=True)
                for name in AXES
                if name != "layout"
            }
            wrong.append(f"seed {seed}, {sections}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


@multirank(2)
def test_units_of_generated_jobs(rank: int, world_size: int) -> None:
    check_all(range(6), rank, world_size)


@pytest.mark.extensive("more of them")
@multirank(2, timeout=240)
def test_units_of_more_generated_jobs(rank: int, world_size: int) -> None:
    check_all(range(6, 90), rank, world_size)


@pytest.mark.extensive("four ranks")
@multirank(4, timeout=240)
def test_units_of_generated_jobs_on_four_ranks(rank: int, world_size: int) -> None:
    check_all(range(100, 140), rank, world_size)


@pytest.mark.extensive("two whole runs")
def test_a_resume_from_an_earlier_checkpoint_leaves_each_step_once(tmp_path: Path) -> None:
    """A file has the steps that were lost, too, and readers see those that count."""
    run, config = tmp_path / "run", config_file(tmp_path)
    more = ("--parallel.engine", "shardwright", "--run.sample_tokens", "0", "--log.unit_norms", "1")
    assert train_here(config, "--run.dir", run, *more, "--train.steps", "5") == 0
    shutil.rmtree(run / "checkpoints" / "step-5")
    assert train_here(config, "--resume", run, *more, "--train.steps", "7") == 0
    lines = [json.loads(line) for line in (run / "unit_norms.jsonl").read_text().splitlines() if line]
    counts = Counter(line["step"] for line in lines if "step" in line)
    assert counts == Counter({step: 1 + (step in (4, 5)) for step in range(1, 8)})
    read = read_unit_norms(run / "unit_norms.jsonl")
    assert [*read.steps] == [*range(1, 8)] and not read.damaged
    totals = {record["step"]: record["grad_norm"] for record in records(run)}
    for step, norms in read.steps.items():
        # The file has four digits of a norm.
        assert math.hypot(*(norm or 0.0 for norm in norms.values())) == pytest.approx(totals[step], rel=1e-3)
