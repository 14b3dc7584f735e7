"""Checkpoints that processes of their own write while the steps go on: the same bytes, the same failures."""

from __future__ import annotations

import json
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from shardwright.checkpoint.format.boxes import Box
from shardwright.checkpoint.format.index import parse_index
from shardwright.checkpoint.save.collective_save import read_back
from shardwright.checkpoint.save.writing import BoxToWrite, write_boxes
from shardwright.checkpoint.storage.local_store import LocalStore
from shardwright.train.config import CheckpointConfig
from shardwright.train.launch.signals import StopRequest
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.position import Position
from shardwright.train.step.loading import verified_checkpoint
from shardwright.train.step.saving.checkpoint import SaveFailedError
from shardwright.train.step.saving.saves import Saves
from tests.support import multirank
from tests.train.kit.damage import Job, flipped
from tests.train.kit.jobs import (
    config_file,
    finish,
    losses,
    ranks,
    run_record,
    start,
    steps_in,
    tiny,
    trainer,
    wait_for,
    wait_for_steps,
)

BACKGROUND = ("--checkpoint.asynchronous", "true")
ENGINE = ("--parallel.engine", "shardwright")


def digests(folder: Path) -> dict[str, list[Any]]:
    """The digest of every part of model and optimizer."""
    index = parse_index((folder / "index.json").read_bytes())
    names = [name for name in index.tensors if not name.startswith("generators.")]
    return {name: [chunk.sha256 for chunk in index.tensors[name].chunks] for name in names}


@pytest.mark.extensive("a writer; checkpoint/asynchronous has one")
def test_a_run_with_background_saves_leaves_the_same_checkpoints(tmp_path: Path, sharded_run: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    job = ("train", config, *ENGINE, *BACKGROUND)
    assert ranks(2, *job, "--run.dir", folder, "--checkpoint.every", "2") == [(0, ""), (0, "")]
    checkpoints = folder / "checkpoints"
    assert steps_in(checkpoints) == [8, 6] and len(list(checkpoints.iterdir())) == 2
    for step in (8, 6):
        verified_checkpoint(checkpoints / f"step-{step}")
        assert digests(checkpoints / f"step-{step}") == digests(sharded_run / "checkpoints" / f"step-{step}")
    assert losses(folder) == losses(sharded_run)


@pytest.mark.extensive("another run")
def test_a_run_goes_on_without_room_for_a_copy_but_for_the_last_checkpoint(tmp_path: Path) -> None:
    """Where no file may be so large, neither in memory nor on the disk."""
    folder = tmp_path / "run"
    goes_on = ("--checkpoint.on_save_failure", "continue")
    job = ("train", config_file(tmp_path), *ENGINE, *BACKGROUND, *goes_on, "--run.dir", folder)
    (status, err), (other, silent) = ranks(2, *job, largest_file=100_000)
    assert (status, other, silent) == (2, 2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and "step-8: cannot write: rank " in err
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    failures = {line["step"]: line["save_failure"] for line in lines if "save_failure" in line}
    assert list(failures) == [3, 6] and all("no memory for a copy of" in text for text in failures.values())
    assert run_record(folder)["status"] == "failed"
    assert list((folder / "checkpoints").iterdir()) == []


@pytest.mark.extensive("another writer")
@multirank(2, timeout=120)  # processes that import torch start in it
def test_a_failure_in_the_background_stops_the_run_or_is_recorded(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """The disk of one rank is full while its process writes. Another rank than the first one notices it, too."""
    job, reporter = Job(tmp_path), Reporter([])
    stop, goes_on = (
        CheckpointConfig(keep=1, asynchronous=True, on_save_failure=p) for p in ("stop", "continue")
    )
    with Saves(goes_on, tmp_path, reporter) as saves:
        _save(job, saves, 1)
        saves.finish()
        if rank == 1:
            resource.prlimit(_writer(saves), resource.RLIMIT_FSIZE, (3000, 3000))
        for settings in (goes_on, stop):
            saves.settings = settings
            _save(job, saves, 2)
            wait_for(saves.has_ended)
            if settings is goes_on:
                saves.finish()
                assert "checkpoint of step 2: " in reporter.failed_saves[0]
            else:
                with pytest.raises(
                    SaveFailedError, match=r"step-2: cannot write: rank 1: \S+__1_0.distcp: File too"
                ):
                    saves.finish()
            dist.barrier()
            assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert job.load().step == 1 and job.is_at(1) and len(reporter.failed_saves) == 1


@multirank(2)
def test_the_end_of_a_save_travels_with_the_step(rank: int, world_size: int) -> None:
    job = trainer(tiny(parallel={"engine": "ddp"}), rank, world_size)
    stop = StopRequest()  # not entered: no handlers in the pool's workers
    assert [job.train_step(stop, save_ended=rank == who).agreed.save_ended for who in (2, 0, 1)] == [
        False,
        True,
        True,
    ]


def _writer(saves: Saves) -> int:
    """The process that writes for this rank."""
    assert saves._background is not None and saves._background._writer is not None
    return saves._background._writer.pid


def _save(job: Job, saves: Saves, step: int, last: bool = False) -> None:
    job.at(step)
    saves.save(job.model, job.optimizer, Position(step, 4 * step), last)
    job.at(77)  # what is written is a copy


@pytest.mark.extensive("another writer")
def test_a_signal_waits_for_what_is_written(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    job = start(
        "train", config, *ENGINE, *BACKGROUND, "--run.dir", folder, "--nproc", "2", "--train.steps", "100000",
        "--checkpoint.every", "1", "--validation.every", "0",
    )  # fmt: skip
    wait_for_steps(folder, 3)
    job.send_signal(signal.SIGTERM)
    status, out, err = finish(job, timeout=60)
    assert (status, err) == (143, "") and "stopped by SIGTERM" in out
    steps = steps_in(folder / "checkpoints")
    assert len(steps) == 2 and all(
        verified_checkpoint(folder / "checkpoints" / f"step-{step}") for step in steps
    )
    assert len(list((folder / "checkpoints").iterdir())) == 2


@pytest.mark.extensive("another writer")
@multirank(2, timeout=120)  # processes that import torch start in it
def test_a_writer_that_is_killed_costs_one_checkpoint(rank: int, world_size: int, tmp_path: Path) -> None:
    job, reporter = Job(tmp_path), Reporter([])
    settings = CheckpointConfig(keep=1, asynchronous=True, on_save_failure="continue")
    with Saves(settings, tmp_path, reporter) as saves:
        _save(job, saves, 1)
        if rank == 0:
            wait_for(saves.has_ended)
        saves.finish()
        assert steps_in(tmp_path) == [1]
        writer = psutil.Process(_writer(saves))
        if rank == 1:
            writer.suspend()
        dist.barrier()
        _save(job, saves, 2)
        if rank == 1:
            writer.kill()
            wait_for(saves.has_ended)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that another one is started
            _save(job, saves, 3)
        assert len(reporter.failed_saves) == 1 and "checkpoint of step 2: " in reporter.failed_saves[0]
        _save(job, saves, 4, last=True)
        dist.barrier()
        assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
        processes = [writer, psutil.Process(_writer(saves))]
    assert job.load().step == 4 and job.is_at(4)
    assert not any(process.is_running() for process in processes)


def test_a_flipped_byte_in_the_background_is_a_failure(tmp_path: Path) -> None:
    """Each process reads back what it has written, before the checkpoint gets its name."""
    save = LocalStore(tmp_path / "c").unfinished()
    save.begin(0, overwrite=False)
    written = write_boxes(save, "__0_0.distcp", [BoxToWrite("w", Box((0,), torch.arange(50.0)))])
    read_back(save, written)
    flipped(save.path / "__0_0.distcp", save.path)
    with pytest.raises(OSError, match=r"read back after it was written, __0_0\.distcp is not the file"):
        read_back(save, written)
