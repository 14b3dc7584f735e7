"""A launch by torchrun, whose attempts share a folder: how a restarted rank finds it, and how earlier attempts ended.

torchrun starts the same command again, and does not say where the first attempt wrote. launch.json in the folder has
the launch. Our own launcher does not need it. The first rank reads it; the rank that records the end of an attempt adds
that.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from shardwright.train.config import RunConfig
from shardwright.train.errors import JobError, UserError
from shardwright.train.launch.environment import RUN_ID, under_torchrun
from shardwright.train.launch.restarts import AttemptEnd, same_again
from shardwright.train.run.exits import FAILED, USER_ERROR, Outcome
from shardwright.train.run.finding import CONTINUE, find_run
from shardwright.train.run.folder import RUNS, RunFolder
from shardwright.train.run.metrics import recorded_step
from shardwright.train.run.writing import write_json


class GivenUpError(JobError):
    """torchrun has started the job again, but it would have the same `end` as before."""

    def __init__(self, end: Outcome) -> None:
        super().__init__(end)
        self.end = end

    def __str__(self) -> str:
        return self.end.reason


@dataclass(frozen=True)
class TorchrunLaunch:
    """A launch by torchrun, and its attempts in the run's folder.

    Attributes:
        agents: the torchrun processes of all hosts, each with host, process and time of its start.
        attempt: 1 for the first one.
        ends: of the attempts before.
    """

    agents: tuple[str, ...]
    attempt: int = 1
    ends: tuple[AttemptEnd, ...] = ()

    def continues(self, before: TorchrunLaunch) -> bool:
        """Return whether this is a later attempt of the launch `before`: a torchrun process is the same.

        The id of a rendezvous says less. It is "none" by default, and people use one again.
        """
        return bool(set(self.agents) & set(before.agents))

    def check_worth(self) -> None:
        """Raise GivenUpError if the attempts before ended with an error that the next one would meet, too."""
        if self.ends and self.ends[-1].status == USER_ERROR:
            reason = f"{self.ends[-1].reason} (the attempt before ended with this; a restart cannot help)"
            raise GivenUpError(Outcome(USER_ERROR, reason))
        if again := same_again(self.ends):
            raise GivenUpError(Outcome(FAILED, f"{self.ends[-1].reason}: {again}"))


def agent() -> str | None:
    """Return the torchrun process that started this rank: host, process and time of its start. None without
    torchrun."""
    if not under_torchrun():
        return None
    process = agent_process()
    return f"{socket.gethostname()} {process.pid} {_start_of(process)}"


def agent_process() -> psutil.Process:
    """Return the torchrun process that started this rank: the nearest one above it that has no variables of a rank.

    A script may be in between. It is another process at each restart.
    """
    agent = psutil.Process(os.getppid())
    try:
        for above in psutil.Process().parents():
            if RUN_ID not in above.environ():
                agent = above
                break
    except psutil.Error:
        pass  # of another user: the parent, then
    return agent


def _start_of(process: psutil.Process) -> str:
    """Return the start time of a process, the same for all that ask. psutil's time on Linux moves when the clock is
    set."""
    try:
        with open(f"/proc/{process.pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[19]
    except OSError:
        return f"{process.create_time():.2f}"


def attempt_before(
    run: RunConfig, resume: str | None, launch: TorchrunLaunch
) -> tuple[RunFolder, TorchrunLaunch] | None:
    """Return the folder of the attempt before, and the launch that its file has; None for the first attempt."""
    for folder in _candidates(run, resume):
        earlier = _read(folder)
        if earlier is not None and launch.continues(earlier):
            return folder, earlier
    return None


def _candidates(run: RunConfig, resume: str | None) -> Iterator[RunFolder]:
    if resume is not None and resume != CONTINUE:
        yield find_run(run, resume)
    elif run.dir:
        yield RunFolder(Path(run.dir))
    elif RUNS.is_dir():
        folders = (RunFolder(path) for path in RUNS.glob(f"{run.name}-*"))
        launched = [folder for folder in folders if folder.launch_file.is_file()]
        yield from sorted(launched, key=lambda folder: folder.launch_file.stat().st_mtime, reverse=True)


def record_end(folder: RunFolder, end: Outcome) -> None:
    """Add the end of this attempt to launch.json, if there is one."""
    launch = _read(folder)
    if launch is not None:
        step = recorded_step(folder.metrics_file) if end.done is None else end.done
        try:
            write_launch(
                folder, replace(launch, ends=(*launch.ends, AttemptEnd(end.status, end.reason, step)))
            )
        except UserError:
            pass  # the disk is full; the error that ended the job is what the user needs


def write_launch(folder: RunFolder, launch: TorchrunLaunch) -> None:
    content = {"agents": list(launch.agents), "attempt": launch.attempt}
    ends = [each._asdict() for each in launch.ends]
    write_json(folder.launch_file, {**content, "ends": ends})


def _read(folder: RunFolder) -> TorchrunLaunch | None:
    """None without the file, and for one that is damaged."""
    try:
        content = json.loads(folder.launch_file.read_text(encoding="utf-8"))
        ends = tuple(
            AttemptEnd(int(each["status"]), str(each["reason"]), int(each["step"]))
            for each in content["ends"]
        )
        agents = tuple(str(agent) for agent in content["agents"])
        return TorchrunLaunch(agents, int(content["attempt"]), ends)
    except (OSError, ValueError, LookupError, TypeError):
        return None
