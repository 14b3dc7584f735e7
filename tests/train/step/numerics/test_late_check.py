"""`[fault] check = "after_step"`: the host reads the numbers of a step one step late, and nothing else differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.train.extend import StepRecord, TrainerHook
from shardwright.train.launch.signals import StopRequest
from shardwright.train.step.numerics.detect import FaultError
from shardwright.train.step.trainer import Trainer
from tests.support import multirank
from tests.train.kit.jobs import HYBRID, steps_in, tiny, trainer
from tests.train.kit.parallel import take_steps
from tests.train.parallel.kit.float8 import emulated
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


def result_of(
    folder: Path, check: str, name: str, rank: int, world_size: int, given: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """All that a run leaves behind: its lines, its last state, its error, and the samples that it left out. `given`:
    sections of its configuration."""
    plant, fault = RUNS[name]
    train = {"steps": STEPS, "micro_batch": G // world_size, "max_norm": 1.0}
    sections = {
        **given,
        "train": train | given.get("train", {}),
        "checkpoint": {"every": 5},
        "fault": {**fault, "check": check},
    }
    config = job(**sections)
    place = folder.with_name(f"{folder.name} {check}")
    place.parent.mkdir(exist_ok=True)
    run, error = Run(place, config, rank, world_size, plant), ""
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


def check_run(name: str, folder: Path, rank: int, world_size: int, **sections: dict[str, Any]) -> None:
    found = [
        result_of(folder / name, check, name, rank, world_size, sections)
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
            check_run(name, tmp_path / engine, rank, world_size, parallel={"engine": engine})


#: Parts of a configuration that change what a step does, each in sections of its own.
CROSSED: dict[str, dict[str, dict[str, Any]]] = {
    "accumulation": {"train": {"micro_batch": 2}},
    "held gradients": {"train": {"micro_batch": 2, "accumulate": "hold"}},
    "packed documents": {"data": {"document_mask": True}, "train": {"seq_len": 16}},
    "padded samples": {"data": {"packing": "none"}},
    "tensor": {"parallel": {"tensor": 2}, "model": {"n_kv_heads": 2}, "train": {"micro_batch": G}},
    "context": {"parallel": {"context": 2}, "train": {"micro_batch": G}},
    "experts": {"parallel": {"expert": 2}, "model": {**HYBRID, "pattern": "E*-", "mtp_pattern": ""}},
    "bfloat16": {"parallel": {"param_dtype": "bfloat16"}},
    "float8": {
        "parallel": {"param_dtype": "bfloat16"},
        "model": {"dim": 32, "ffn_dim": 64},
        "train": {"float8": "tensorwise", "seq_len": 16},
    },
    "adapters": {"finetune": {"method": "lora", "rank": 2, "dropout": 0.5}},
    "zero1": {"parallel": {"strategy": "zero1"}},
    "arena": {"parallel": {"memory": "arena"}},
    "compiled": {"train": {"compile": "aot_eager"}},
    "recomputed": {"activations": {"checkpoint": "full"}},
    "norms by unit": {"log": {"unit_norms": 1}},
}


@pytest.mark.extensive("each part that changes a step", but=("tensor-*",))
@multirank(2)
@pytest.mark.parametrize("crossed", CROSSED)
def test_a_late_check_changes_no_number_of_other_steps(
    rank: int, world_size: int, crossed: str, tmp_path: Path
) -> None:
    torch._dynamo.reset()
    with emulated() if crossed == "float8" else nullcontext():
        check_run("skip", tmp_path, rank, world_size, **CROSSED[crossed])


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


def passing(first: int, factor: float) -> Plant:
    """Multiply the losses of the step that begins with sample `first`, the first time that it is done."""
    done = []

    def plant(job: Trainer, sums: torch.Tensor) -> torch.Tensor:
        if job.position.samples != first or len(done) == 2:  # micro-batches
            return sums
        done.append(True)
        return sums * factor

    return plant


@pytest.mark.extensive("a spike, too", but=("nan-*",))
@multirank(2)
@pytest.mark.parametrize("factor", [math.nan, 3.0])
def test_a_step_that_is_good_the_second_time_is_an_incident(
    rank: int, world_size: int, factor: float, tmp_path: Path
) -> None:
    found = []
    for name, plant in (("clean", None), ("passing", passing(7 * G, factor))):
        config = job(
            train={"steps": STEPS},
            checkpoint={"every": 5},
            fault={**LATE, "on_spike": "skip", "spike_window": 8},
        )
        run = Run(tmp_path / name, config, rank, world_size, plant)
        run.go()
        found.append((run.trainer.position, [part_of(each) for each in run.trainer.model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))
    if rank == 0:
        (line,) = lines_of(run, event=True)
        incident = line["incident"]
        what = "loss nan, norm nan" if math.isnan(factor) else "a spike above"
        assert line["step"] == 8 and incident["action"] == "repeat" and what in incident["reason"]
        assert incident["samples"] == [7 * G, 8 * G]
        (said,) = [each for each in run.lines if "done again" in each]
        assert said == f"warning: {incident['reason']}"
        assert [each["step"] for each in lines_of(run)] == [*range(1, STEPS + 1)]


class Fails(TrainerHook):
    """Fails when a step is reported, as a full disk does."""

    def after_step(self, record: StepRecord) -> None:
        if record.step == 7:
            raise OSError("no space")


@pytest.mark.extensive("each way to end", but=("an error-*", "a signal-*"))
@multirank(1)
@pytest.mark.parametrize("way", ["an error", "a wrong step", "a signal", "a signal and a wrong step"])
def test_nothing_tells_of_a_step_whose_numbers_were_not_read(
    rank: int, world_size: int, way: str, tmp_path: Path
) -> None:
    """A step has begun when the run ends: its numbers are read before it is saved or logged, or it is neither."""
    plant = on_samples(7 * G, math.nan) if "wrong step" in way else None
    config = job(train={"steps": STEPS, "micro_batch": 6}, checkpoint={"every": 5}, fault=LATE)
    run, begun = Run(tmp_path, config, rank, world_size, plant), []
    hooks = [Fails()] if way == "an error" else []
    open_hooks = run.trainer.open_hooks
    run.trainer.open_hooks = lambda reporter, loaded: open_hooks(reporter, hooks, loaded)  # type: ignore[method-assign,misc,assignment]
    start = run.trainer._start
    run.trainer._start = lambda *given, **named: (begun.append(1), start(*given, **named))[1]  # type: ignore[method-assign,assignment,func-returns-value]
    before = signal_before(run, 7, rank) if "signal" in way else lambda: None
    raised = {"an error": OSError, "a signal": ()}.get(way, FaultError)
    try:
        run.go(before)
        assert not raised
    except (OSError, FaultError) as error:
        assert isinstance(error, raised)
    done = {"an error": 7, "a signal": 9}.get(way, 7)
    # With an error the step after it had begun. A wrong one is done again, after the one that had begun after it.
    assert len(begun) == {"an error": 8, "a signal": 9}.get(way, 10), begun
    assert run.trainer.position.step == done and run.trainer.is_ahead is (way == "an error")
    assert [line["step"] for line in lines_of(run)] == [*range(1, done + 1)]
    saved = [5] if way == "an error" else [done, 5]
    assert steps_in(run.folder.checkpoints) == saved
    resumed = Run(tmp_path, config, rank, world_size).resume()
    plain = trainer(job(train={"steps": STEPS, "micro_batch": 6}), rank, world_size)
    take_steps(plain, saved[0])
    for one, other in zip(resumed.trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(part_of(one), part_of(other))


def test_jobs_whose_steps_cannot_be_left_out_are_refused() -> None:
    tiny(fault=LATE)
    for sections, words in (
        ({"optimizer": {"name": "muon"}}, "optimizer.name = 'muon'"),
        ({"run": {"hooks": ["shardwright.train.config.catalog.hooks:TrainerHook"]}}, "run.hooks"),
        ({"fault": {**LATE, "verify_every": 2}}, "fault.verify_every = 2"),
    ):
        with pytest.raises(ValueError, match=f"fault.check: expected 'before_step' with {words}"):
            tiny(**{"fault": LATE, **sections})
