"""A launch by torchrun, whose attempts share a folder: how a restarted rank finds it, and how earlier attempts ended.

torchrun starts the same command again, and does not say where the first attempt wrote. launch.json in the folder has
the launch. Our own launcher does not need it. Only the first rank reads and writes here.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch.distributed as dist

from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.launch.rendezvous import RUN_ID
from shardwright.train.launch.restarts import goes_on, same_again, without_numbers
from shardwright.train.run.exits import FAILED, USER_ERROR, End, remove_exit, write_exit
from shardwright.train.run.folder import CONTINUE, RUNS, RunFolder, check_same_job, find_run, open_folder
from shardwright.train.run.lock import FolderLock, claim
from shardwright.train.run.position import recorded_step
from shardwright.train.run.record import repair_record, sessions_of
from shardwright.train.run.writing import write_json, writing

SECONDS_TO_UNLOCK = 30.0
"""How long a restart waits for the ranks before it, which may be ending on another host."""


class GivenUpError(Exception):
    """torchrun has started the job again, but it would end as before, with this status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Launch:
    """What torchrun says of a launch, and what the folder says of its attempts.

    Attributes:
        agents: the torchrun processes of all hosts, each with host, process and time of its start.
        attempt: 1 for the first one.
        ends: status, reason and step of the attempts before.
    """

    agents: tuple[str, ...]
    attempt: int = 1
    ends: tuple[tuple[int, str, int], ...] = ()

    def continues(self, before: Launch) -> bool:
        """Whether this is a later attempt of the launch `before`: a torchrun process is the same.

        The id of a rendezvous says less. It is "none" by default, and people use one again.
        """
        return bool(set(self.agents) & set(before.agents))

    def check_worth(self) -> None:
        """Raise GivenUpError if the attempts before ended with an error that the next one would meet, too."""
        if self.ends and self.ends[-1][0] == USER_ERROR:
            raise GivenUpError(
                USER_ERROR, f"{self.ends[-1][1]} (the attempt before ended with this; a restart cannot help)"
            )
        failures = [(without_numbers(reason), step) for status, reason, step in self.ends if status == FAILED]
        if failures[-1:] * 2 == failures[-2:] and self.ends and self.ends[-1][0] == FAILED:
            _, reason, step = self.ends[-1]
            raise GivenUpError(FAILED, f"{reason}: {same_again(step)}")


def this_launch(size: int) -> Launch | None:
    """The launch of this rank. Called by every rank; None if torchrun has not started the first one."""
    everyone: list[str | None] = [None] * size
    dist.all_gather_object(everyone, _agent() if RUN_ID in os.environ else None)
    if everyone[0] is None:
        return None
    return Launch(tuple(dict.fromkeys(agent for agent in everyone if agent is not None)))


def _agent() -> str:
    agent = agent_process()
    return f"{socket.gethostname()} {agent.pid} {_start_of(agent)}"


def agent_process() -> psutil.Process:
    """The torchrun process that started this rank: the nearest one above it that has no variables of a rank.

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
    """When a process started, the same whoever asks. psutil's time on Linux moves when the clock is set."""
    try:
        with open(f"/proc/{process.pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[19]
    except OSError:
        return f"{process.create_time():.2f}"


@dataclass(frozen=True)
class Opened:
    """The folder of a run, locked for this attempt."""

    folder: RunFolder
    lock: FolderLock
    resumes: bool
    attempt: int


def open_attempt(config: Config, resume: str | None, launch: Launch | None) -> Opened:
    """The folder of the run: for a later attempt of a launch the first one's, else as `open_folder` says.

    Raises:
        UserError: as `open_folder` does.
        GivenUpError: the attempt would end as those before.
    """
    before = None if launch is None else _attempt_before(config, resume, launch)
    if before is None and resume == CONTINUE:
        opened = open_or_reopen(config, RunFolder(Path(config.run.dir)))
        if launch is not None:
            launch = replace(launch, attempt=opened.attempt)
    elif before is None:
        folder, lock = open_folder(config, resume)
        opened = Opened(folder, lock, resume is not None, 1)
        if opened.resumes:
            repair_record(folder)
    else:
        assert launch is not None
        folder, earlier = before
        try:
            earlier.check_worth()
        except GivenUpError as error:
            write_exit(folder, End(error.status, error.reason), earlier.attempt)
            raise
        launch = replace(launch, attempt=earlier.attempt + 1, ends=earlier.ends)
        lock = reopen(config, folder)
        opened = Opened(folder, lock, goes_on(folder), launch.attempt)
    remove_exit(opened.folder)
    if launch is not None:
        _write(opened.folder, launch)
    return opened


def open_or_reopen(config: Config, folder: RunFolder) -> Opened:
    """The run in a folder, from its newest checkpoint or, without one, from the start; else a new run there.

    Raises UserError, if that is the run of another job, for example.
    """
    if not folder.exists():
        return Opened(*open_folder(config, None), False, 1)
    attempt = sessions_of(folder) + 1
    lock = reopen(config, folder)
    return Opened(folder, lock, goes_on(folder), attempt)


def reopen(config: Config, folder: RunFolder) -> FolderLock:
    """Prepare the folder of an earlier attempt for the next one, once that has ended. Raises UserError."""
    lock = _claim_patiently(folder.path)
    if folder.exists():
        repair_record(folder)
        check_same_job(folder, config, "a restart")
    return lock


def _claim_patiently(folder: Path) -> FolderLock:
    deadline = time.monotonic() + SECONDS_TO_UNLOCK
    while True:
        try:
            with writing(folder):
                return claim(folder)
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _attempt_before(config: Config, resume: str | None, launch: Launch) -> tuple[RunFolder, Launch] | None:
    for folder in _candidates(config, resume):
        earlier = _read(folder)
        if earlier is not None and launch.continues(earlier):
            return folder, earlier
    return None


def _candidates(config: Config, resume: str | None) -> Iterator[RunFolder]:
    if resume is not None and resume != CONTINUE:
        yield find_run(config, resume)
    elif config.run.dir:
        yield RunFolder(Path(config.run.dir))
    elif RUNS.is_dir():
        folders = (RunFolder(path) for path in RUNS.glob(f"{config.run.name}-*"))
        launched = [folder for folder in folders if folder.launch_file.is_file()]
        yield from sorted(launched, key=lambda folder: folder.launch_file.stat().st_mtime, reverse=True)


def record_end(folder: RunFolder, end: End) -> None:
    """Add the end of this attempt to launch.json, if there is one."""
    launch = _read(folder)
    if launch is not None:
        step = recorded_step(folder.metrics_file) if end.done is None else end.done
        try:
            _write(folder, replace(launch, ends=(*launch.ends, (end.status, end.reason, step))))
        except UserError:
            pass  # the disk is full; the error that ended the job is what the user needs


def _write(folder: RunFolder, launch: Launch) -> None:
    content = {"agents": list(launch.agents), "attempt": launch.attempt}
    ends = [{"status": status, "reason": reason, "step": step} for status, reason, step in launch.ends]
    write_json(folder.launch_file, {**content, "ends": ends})


def _read(folder: RunFolder) -> Launch | None:
    """None without the file, and for one that is damaged."""
    try:
        content = json.loads(folder.launch_file.read_text(encoding="utf-8"))
        ends = tuple(
            (int(each["status"]), str(each["reason"]), int(each["step"])) for each in content["ends"]
        )
        agents = tuple(str(agent) for agent in content["agents"])
        return Launch(agents, int(content["attempt"]), ends)
    except (OSError, ValueError, LookupError, TypeError):
        return None
