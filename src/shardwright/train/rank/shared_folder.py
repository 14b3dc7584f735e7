"""The run's folder on all ranks of a job without our launcher: the first rank opens it, and every rank must see it."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from shardwright.comm.noted import noted
from shardwright.train.config import Config
from shardwright.train.errors import JobError, UserError
from shardwright.train.launch.attempts import this_launch
from shardwright.train.launch.opening import OpenedRun, open_run
from shardwright.train.parallel.world import World
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.writing import writing

SECONDS_TO_APPEAR = 10.0
"""Time that a file of one host may take to appear on another, at most."""


def open_together(config: Config, resume: str | None, world: World) -> OpenedRun:
    """The run's folder, which the first rank opens and locks. Called by every rank.

    Raises:
        JobError: on every rank: the first rank cannot open the folder, or a rank does not see its files.
    """
    launch = this_launch(world.size)
    run: OpenedRun | None = None
    outcome: list[Any] = [None]
    if world.is_first:
        try:
            run = open_run(config, resume, launch)
            outcome = [_of_other_ranks(run)]
        except JobError as error:
            outcome = [error]
    with noted("broadcast of the folder", None):
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], JobError):
        raise outcome[0]
    run = run or cast(OpenedRun, outcome[0])
    try:
        _check_seen(run.folder.path, world.is_first)
    except UserError:
        run.discard_if_unused()
        raise
    return run


def _of_other_ranks(run: OpenedRun) -> OpenedRun:
    """The same run in the processes of other ranks, whose working folders may differ. They have no lock."""
    folder = RunFolder(Path(os.path.abspath(run.folder.path)))
    return replace(run, lock=nullcontext(), job_end=replace(run.job_end, folder=folder))


def _check_seen(folder: Path, is_first: bool) -> None:
    """Raise UserError on every rank if a rank does not see the files of the first rank in the run's folder.

    Called by every rank. Each rank writes a part of each checkpoint there, and a resume needs all parts.
    """
    sign = [f".seen-by-all-hosts-{secrets.token_hex(8)}"]
    problem = [""]
    if is_first:
        try:
            with writing(folder):
                (folder / sign[0]).touch()
        except UserError as error:
            problem = [str(error)]
    dist.broadcast_object_list(message := [*sign, *problem], src=0)
    name, problem[0] = message
    if problem[0]:
        raise UserError(problem[0])
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while not (seen := (folder / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    everyone: list[tuple[bool, str]] = [(True, "")] * dist.get_world_size()
    dist.all_gather_object(everyone, (seen, socket.gethostname()))
    if is_first:
        (folder / name).unlink(missing_ok=True)
    for rank, (has_seen, host) in enumerate(everyone):
        if not has_seen:
            raise UserError(
                f"run.dir: expected a folder that all hosts share, found {folder.absolute()} of rank 0 (host "
                f"{everyone[0][1]}) not shared with rank {rank} (host {host}); set run.dir to a folder on a file "
                "system that all hosts have under the same path"
            )
