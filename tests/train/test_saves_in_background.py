"""Checkpoints that processes of their own write while the steps go on: the same bytes, the same failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from shardwright import cli
from shardwright.checkpoint.index import parse_index
from shardwright.checkpoint.ranks import Ranks
from shardwright.train.checkpoint import SaveFailedError, saved_steps, verified
from shardwright.train.reporter import Reporter
from shardwright.train.runs import RunFolder
from shardwright.train.saves import Saves
from shardwright.train.sections.checkpoint import CheckpointConfig
from shardwright.train.steps import Position
from tests.support import multirank
from tests.train.damage import Job
from tests.train.jobs import config_file, finish, losses, ranks, start, train_here, wait_for, wait_for_steps

BACKGROUND = ("--checkpoint.asynchronous", "true")
ENGINE = ("--parallel.engine", "shardwright")


def digests(folder: Path) -> dict[str, list[Any]]:
    """Of every part of model and optimizer."""
    index = parse_index((folder / "index.json").read_bytes())
    names = [name for name in index.tensors if not name.startswith("generators.")]
    return {name: [part.sha256 for part in index.tensors[name].parts] for name in names}


def test_a_run_with_background_saves_leaves_the_same_checkpoints(tmp_path: Path, sharded_run: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    job = ("train", config, *ENGINE, *BACKGROUND)
    assert ranks(2, *job, "--run.dir", folder, "--checkpoint.every", "2") == [(0, ""), (0, "")]
    checkpoints = folder / "checkpoints"
    assert saved_steps(checkpoints) == [8, 6] and len(list(checkpoints.iterdir())) == 2
    for step in (8, 6):
        verified(checkpoints / f"step-{step}", Ranks())
        assert digests(checkpoints / f"step-{step}") == digests(sharded_run / "checkpoints" / f"step-{step}")
    assert losses(folder) == losses(sharded_run)
    shutil.rmtree(checkpoints / "step-8")
    assert ranks(2, *job, "--resume", folder) == [(0, ""), (0, "")]
    assert losses(folder) == losses(sharded_run)


def test_a_failure_in_the_background_stops_the_run_or_is_recorded(tmp_path: Path) -> None:
    """On a disk on which no checkpoint fits; the failure is noticed a few steps after the save began."""
    config = config_file(tmp_path)
    goes_on = ("--checkpoint.on_save_failure", "continue")
    for name, options, steps in (("stops", (), 100_000), ("goes-on", goes_on, 8)):
        folder = tmp_path / name
        job = ("train", config, *ENGINE, *BACKGROUND, *options, "--run.dir", folder, "--train.steps", str(steps))
        quiet = ("--validation.every", "0", "--run.sample_tokens", "0")
        (status, err), (other, silent) = ranks(2, *job, *quiet, largest_file=100_000)
        assert (status, other, silent) == (2, 2, "")
        assert err.startswith("error: ") and err.count("\n") == 1 and "cannot write: rank " in err
        assert "File too large" in err
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        failed = [line["step"] for line in lines if "save_failure" in line]
        assert failed == ([3, 6] if options else [])
        assert RunFolder(folder).record()["status"] == "failed"
        assert list((folder / "checkpoints").iterdir()) == []
        assert len([line for line in lines if "loss" in line]) < 10_000


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
    steps = saved_steps(folder / "checkpoints")
    assert len(steps) == 2 and all(verified(folder / "checkpoints" / f"step-{step}", Ranks()) for step in steps)
    assert len(list((folder / "checkpoints").iterdir())) == 2


@multirank(2)
def test_a_writer_that_is_killed_costs_one_checkpoint(rank: int, world_size: int, tmp_path: Path) -> None:
    """Noticed by its rank alone, and by all at the next save."""
    job, reporter = Job(tmp_path), Reporter([])
    settings = CheckpointConfig(keep=1, asynchronous=True, on_save_failure="continue")
    before = set(psutil.Process().children())
    with Saves(settings, tmp_path, reporter) as saves:

        def save(step: int, last: bool = False) -> None:
            job.at(step)
            saves.save(job.model, job.optimizer, Position(step, 4 * step), last)

        save(1)
        job.at(7)  # what is written is a copy
        wait_for(saves.has_ended) if rank == 0 else None
        saves.conclude()
        assert saved_steps(tmp_path) == [1]
        (writer,) = set(psutil.Process().children()) - before
        if rank == 1:
            writer.suspend()
        dist.barrier()
        save(2)
        if rank == 1:
            os.kill(writer.pid, signal.SIGKILL)
            wait_for(saves.has_ended)
        with pytest.warns(UserWarning, match="Another one is started") if rank == 1 else _nothing():
            save(3)
        assert len(reporter.failed_saves) == 1 and "step 2 is not saved: " in reporter.failed_saves[0]
        save(4, last=True)
        dist.barrier()
        assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
    assert job.load().step == 4 and job.is_at(4)
    assert not set(psutil.Process().children()) - before
