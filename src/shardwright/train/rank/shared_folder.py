"""The run's folder on all ranks of a job without our launcher: the first rank opens it, and every rank must see it."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from shardwright.engine import RankGroup
from shardwright.train.config import Config
from shardwright.train.errors import JobError, UserError
from shardwright.train.launch.opening import OpenedRun, open_run
from shardwright.train.launch.torchrun import TorchrunLaunch, agent
from shardwright.train.parallel.world import World
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.writing import writing

SECONDS_TO_APPEAR = 10.0
"""Time that a file of one host may take to appear on another, at most."""


def open_together(config: Config, resume: str | None, world: World) -> OpenedRun:
    """Return the run's folder, which the first rank opens and locks. Called by every rank.

    Raises:
        JobError: on every rank: the first rank cannot open the folder, or a rank does not see its files.
    """
    launch = _this_launch()
    opened: OpenedRun | None = None
    outcome: JobError | OpenedRun | None = None
    try:
        if world.is_first:
            try:
                opened = open_run(config, resume, launch)
                outcome = _of_other_ranks(opened)
            except JobError as error:
                outcome = error
        outcome = RankGroup().broadcast(outcome)
        if isinstance(outcome, JobError):
            raise outcome
        run = opened or outcome
        assert run is not None
        _check_seen(run.folder.path)
        return run
    except BaseException:  # this process may live on, and try again
        if opened is not None:
            opened.discard_if_unused()
        raise


def _this_launch() -> TorchrunLaunch | None:
    """Return the launch of this rank. Called by every rank; None if torchrun has not started the first one."""
    everyone = RankGroup().all_gather(agent())
    if everyone[0] is None:
        return None
    return TorchrunLaunch(tuple(dict.fromkeys(each for each in everyone if each is not None)))


def _of_other_ranks(run: OpenedRun) -> OpenedRun:
    """Return the same run in the processes of other ranks, whose working folders may differ. They have no lock."""
    folder = RunFolder(Path(os.path.abspath(run.folder.path)))
    return replace(run, lock=nullcontext(), job_end=replace(run.job_end, folder=folder))


def _check_seen(folder: Path) -> None:
    """Raise UserError on every rank if a rank does not see the files of the first rank in the run's folder.

    Called by every rank. Each rank writes a part of each checkpoint there, and a resume needs all parts.
    """
    ranks = RankGroup()
    sign = folder / ranks.broadcast(f".seen-by-all-hosts-{secrets.token_hex(8)}")

    def touch() -> None:
        with writing(folder):
            sign.touch()

    ranks.run_on_first(touch)
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while not (seen := sign.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    everyone = ranks.all_gather((seen, socket.gethostname()))
    if ranks.is_first:
        sign.unlink(missing_ok=True)
    for rank, (has_seen, host) in enumerate(everyone):
        if not has_seen:
            raise UserError(
                f"run.dir: expected a folder that all hosts share, found {folder.absolute()} of rank 0 (host "
                f"{everyone[0][1]}) not shared with rank {rank} (host {host}); set run.dir to a folder on a file "
                "system that all hosts have under the same path"
            )
