"""`[fault] check = "after_step"`: the host reads the numbers of a step one step late, and nothing else differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.train.launch.signals import StopRequest
from shardwright.train.step.numerics.fault import FaultError
from shardwright.train.step.trainer import Trainer
from tests.support import multirank
from tests.train.kit.jobs import tiny
from tests.train.step.numerics.kit import G, Plant, Run, job, lines_of, on_samples, part_of

STEPS = 12
LATE = {"check": "after_step"}


def twice_wrong(job: Trainer, sums: torch.Tensor) -> torch.Tensor:
    return sums * math.nan if job.position.samples in (6 * G, 7 * G) else sums


def wrong_and_moving(job: Trainer, sums: torch.Tensor) -> torch.Tensor:
    """A step with a wrong loss, and a buffer that each forward changes and uses."""
    model: Any = job.model
    if not hasattr(model, "moving"):
        model.register_buffer("moving", torch.ones(()), persistent=False)
    model.moving.mul_(1.001)
    return sums * model.moving.clone() * (math.nan if job.position.samples == 7 * G else 1.0)


#: A plant, and keys of `[fault]`.
RUNS: dict[str, tuple[Plant | None, dict[str, Any]]] = {
    "clean": (None, {}),
    "stop": (on_samples(7 * G, math.nan), {"on_non_finite": "stop"}),
    "skip": (on_samples(7 * G, math.nan), {"on_non_finite": "skip"}),
    "skip twice": (twice_wrong, {"on_non_finite": "skip"}),
    "rewind": (on_samples(7 * G, math.inf), {"on_non_finite": "rewind"}),
    "moving buffers": (wrong_and_moving, {"on_non_finite": "skip"}),
    "one rank": (on_samples(7 * G, math.nan, rank=0), {"on_non_finite": "skip"}),
    "skip of the last step": (on_samples((STEPS - 1) * G, math.nan), {"on_non_finite": "skip"}),
    "spike": (on_samples(7 * G, 3.0), {"on_spike": "skip", "spike_window": 8}),
    "spike, rewind": (on_samples(7 * G, 3.0), {"on_spike": "rewind", "spike_window": 8}),
}


def result_of(folder: Path, check: str, name: str, rank: int, world_size: int, engine: str) -> dict[str, Any]:
    """All that a run leaves behind: its lines, its last state, its error, and the samples that it left out."""
    plant, fault = RUNS[name]
    config = job(
        {"engine": engine},
        train={"steps": STEPS, "micro_batch": G // world_size, "max_norm": 1.0},
        checkpoint={"every": 5},
        fault={**fault, "check": check},
    )
    run, error = Run(folder.with_name(f"{folder.name} {check}"), config, rank, world_size, plant), ""
    dropped, drop = [], run.trainer._drop
    # A step that is left out on the device is left out after the next one has begun, too, unless it is read at once.
    run.trainer._drop = lambda *given: (dropped.append(run.trainer.is_ahead), drop(*given))  # type: ignore[method-assign,assignment,func-returns-value]
    try:
        run.go()
    except FaultError as raised:
        error = str(raised)
    assert not run.trainer.is_ahead
    state = [each for values in run.trainer.optimizer.state.values() for each in values.values()]
    figures = ("step", "loss", "grad_norm", "lr", "samples")
    return {
        "position": run.trainer.position,
        "error": error,
        "left out on the device": dropped,
        "state": [part_of(each).clone() for each in (*run.trainer.model.parameters(), *state)],
        "lines": [[line[key] for key in figures] for line in lines_of(run)] if rank == 0 else [],
        "incidents": lines_of(run, event=True) if rank == 0 else [],
    }


def check_run(name: str, folder: Path, rank: int, world_size: int, engine: str = "shardwright") -> None:
    found = [
        result_of(folder / f"{engine} {name}", check, name, rank, world_size, engine)
        for check in ("before_step", "after_step")
    ]
    assert rank or len(found[0]["lines"]) >= 5
    assert bool(found[0]["incidents"]) is (rank == 0 and name not in ("clean", "stop"))
    early, late = (each.pop("left out on the device") for each in found)
    assert not early and bool(late) is (name != "clean"), (name, early, late)
    assert any(late) or name in ("clean", "skip of the last step")  # the step after it had begun
    assert all(map(torch.equal, found[0].pop("state"), found[1].pop("state"))), name
    assert found[0] == found[1], name


#: The runs of `make test`.
CENTRAL = ("clean", "moving buffers", "spike, rewind")


@multirank(2)
@pytest.mark.parametrize("name", CENTRAL)
def test_a_late_check_changes_no_number(rank: int, world_size: int, name: str, tmp_path: Path) -> None:
    check_run(name, tmp_path, rank, world_size)


@pytest.mark.extensive("the other actions and places of a fault")
@multirank(1, 2)
def test_a_late_check_changes_no_number_of_any_run(rank: int, world_size: int, tmp_path: Path) -> None:
    for name in RUNS:
        if world_size == 1 or name not in CENTRAL:
            check_run(name, tmp_path, rank, world_size)


@pytest.mark.extensive("engines that step plain tensors or DTensors")
@multirank(2)
def test_a_late_check_changes_no_number_with_other_engines(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    for engine in ("ddp", "fsdp1", "fsdp2"):
        for name in ("clean", "skip"):
            check_run(name, tmp_path, rank, world_size, engine)


@multirank(2)
def test_a_resume_after_a_late_check_goes_on_as_if_nothing_had_happened(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    def config(stop: int) -> Any:
        sections = {"train": {"steps": STEPS, "micro_batch": 6}, "checkpoint": {"every": 5}, "fault": LATE}
        return job(optimizer={"warmup_steps": stop and 2}, **sections)

    whole = Run(tmp_path / "whole", config(1), rank, world_size)
    whole.go()
    signalled = Run(tmp_path / "parts", config(1), rank, world_size)
    ends = signal_before(signalled, 7, rank)
    signalled.go(ends)
    assert signalled.trainer.position.step == 9 and not signalled.trainer.is_ahead  # the one that had begun
    resumed = Run(tmp_path / "parts", config(1), rank, world_size).resume()
    resumed.go()
    for one, other in zip(resumed.trainer.model.parameters(), whole.trainer.model.parameters(), strict=True):
        assert torch.equal(part_of(one), part_of(other))


def signal_before(run: Run, step: int, rank: int) -> Callable[[], None]:
    """A function for `Run.go`: the first rank gets SIGTERM before the call that returns this step.

    The one after it begins in this call and has the signal, and the one after that has begun when it is read.
    """
    train_step = run.trainer.train_step

    def stepped(stop: StopRequest, *arguments: Any) -> Any:
        if rank == 0 and run.trainer.position.step == step - 1:
            stop.note(15)
        return train_step(stop, *arguments)

    run.trainer.train_step = stepped  # type: ignore[method-assign]
    return lambda: None


@multirank(1)
def test_an_error_of_the_next_step_comes_after_the_numbers_of_this_one(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    def fails(job: Trainer, sums: torch.Tensor) -> torch.Tensor:
        if job.position.samples == 7 * G:
            raise RuntimeError("no memory")
        return sums

    config = job(train={"steps": STEPS, "micro_batch": 6}, checkpoint={"every": 5}, fault=LATE)
    run = Run(tmp_path, config, rank, world_size, fails)
    with pytest.raises(RuntimeError, match="no memory"):
        run.go()
    assert [line["step"] for line in lines_of(run)] == [1, 2, 3, 4, 5, 6, 7]
    assert run.trainer.position.step == 7


def test_jobs_whose_steps_cannot_be_left_out_are_refused() -> None:
    tiny(fault=LATE)
    for sections, words in (
        ({"optimizer": {"name": "muon"}}, "optimizer.name = 'muon'"),
        ({"run": {"hooks": ["shardwright.train.config.catalog.hooks:TrainerHook"]}}, "run.hooks"),
        ({"fault": {**LATE, "verify_every": 2}}, "fault.verify_every = 2"),
    ):
        with pytest.raises(ValueError, match=f"fault.check: expected 'before_step' with {words}"):
            tiny(**{"fault": LATE, **sections})
