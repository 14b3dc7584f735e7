"""Numbers that go wrong in a step, and the run that goes on: compared with plain PyTorch on the samples that stay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shardwright.train.checkpoint import saved_steps
from shardwright.train.faults.fault import NonFiniteError
from shardwright.train.faults.past import Past
from shardwright.train.steps import Position
from tests.support import multirank
from tests.support.matrix import select, together
from tests.train.faults.kit import G, Run, job, lines_of, on_samples, plain_losses

ENGINES: list[dict[str, Any]] = [
    {"engine": "ddp"},
    {"engine": "fsdp2"},
    {"strategy": "zero1"},
    {"strategy": "zero2", "layout": "ragged"},
    {"strategy": "zero3", "memory": "arena"},
    {"strategy": "zero3", "layout": "element"},
    {"strategy": "zero3", "offload": "cpu"},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_norm": 0.0},
    {"accumulate": "hold"},
    {"accumulate": "hold", "max_norm": 0.0},
]
ACTIONS = ["skip", "rewind", "stop"]
WRONG = [math.nan, math.inf]
MATRIX = select(
    [
        (world_size, engine, options, action, wrong)
        for world_size in (1, 2, 3)
        for engine in range(len(ENGINES))
        for options in range(len(OPTIONS))
        for action in ACTIONS
        for wrong in WRONG
        if world_size > 1 or ENGINES[engine].get("engine") != "fsdp2"
    ],
    lambda row, strength: together(strength, *row),
)


@multirank(1, 2, 3)
def test_a_step_with_wrong_numbers_is_answered_with_every_engine(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """One rank's loss is wrong in the fifth step: all ranks answer alike."""
    for number, (ranks, engine, options, action, wrong) in enumerate(MATRIX):
        if ranks != world_size:
            continue
        where = f"{ENGINES[engine]} {OPTIONS[options]} {action} {wrong}"
        config = job(ENGINES[engine], train=OPTIONS[options], fault={"on_non_finite": action})
        last = world_size - 1
        run = Run(tmp_path / str(number), config, rank, world_size, on_samples(4 * G, wrong, last))
        if action == "stop":
            words = f"step 5: .* the loss of rank {last} is not finite.*after step 4 is saved"
            with pytest.raises(NonFiniteError, match=words):
                run.go()
            firsts = [0, 1, 2, 3]
            assert run.trainer.position == Position(4, 4 * G)
        elif action == "skip":
            assert run.go() == [n * G for n in range(7)], where
            firsts = [0, 1, 2, 3, 5, 6]
            assert run.trainer.position == Position(6, 7 * G, Past(((4 * G, 5 * G),), skips=1)), where
        else:
            assert run.go() == [n * G for n in range(8)], where
            firsts = [0, 1, 2, 5, 6, 7]  # step 3 is saved
            assert run.trainer.position == Position(6, 8 * G, Past(((3 * G, 5 * G),), rewinds=1)), where
        if rank == 0:
            records = lines_of(run)
            assert [line["step"] for line in records] == list(range(1, len(firsts) + 1)), where
            expected = plain_losses(config, [first * G for first in firsts])
            # Float32 sums in another order, over six steps of a high rate.
            assert [line["loss"] for line in records] == pytest.approx(expected, rel=1e-4), where
            events = lines_of(run, event=True)
            assert [event["incident"]["action"] for event in events] == ([] if action == "stop" else [action])
            newest = saved_steps(run.folder.checkpoints)[0]
            assert newest == (4 if action == "stop" else 6), where
