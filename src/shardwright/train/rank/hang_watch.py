"""The ranks of a job write heartbeats, and any rank that still runs detects a hang. ``watching`` has the rules for
that.

Our launcher judges the ranks that it has started. Without it each rank has a thread that does.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shardwright.engine import heartbeat
from shardwright.engine.compat import call_before_compiling
from shardwright.train.config import FaultConfig
from shardwright.train.errors import UserError
from shardwright.train.launch.judgement import end_of_hang
from shardwright.train.launch.resume import to_continue
from shardwright.train.parallel.rank_facts import rank_and_size
from shardwright.train.run.exits import Outcome
from shardwright.train.run.folder import RunFolder
from shardwright.watching import Hang, HeartbeatReader, Watcher, WatchSettings, start

KEY = "fault.stall_seconds"
"""The setting in messages."""


def write_heartbeat(fault: FaultConfig, compile: str, rank: int, size: int, folder: Path) -> None:
    """Write the heartbeat of a rank of our launcher until the process ends. `compile`: the value of `train.compile`."""
    if not fault.stall_seconds:
        return
    beat = _opened(rank, size)
    atexit.register(heartbeat.close_heartbeat)
    Watcher(beat, {rank: HeartbeatReader(beat)}, _settings(fault, folder, judges=False))
    _prepare(compile)


@contextmanager
def watched(
    fault: FaultConfig, compile: str, folder: Path, record: Callable[[Outcome], None]
) -> Iterator[None]:
    """Watch the ranks of a job without our launcher. All of them call it, inside their process group.

    ``record``: called on one rank with the end of a job that hangs.
    """
    if not fault.stall_seconds:
        yield
        return

    def keep(hang: Hang) -> None:
        record(end_of_hang(hang.verdict))

    try:
        settings = _settings(fault, folder, record=keep)
        watch = start(replace(settings, frame=lambda text: _framed(RunFolder(folder), text)))
    except OSError as error:
        raise UserError(f"{KEY}: {error} 0 is no watch") from error
    _prepare(compile)
    with watch:
        yield


def _framed(folder: RunFolder, text: str) -> str:
    """Return the text that our launcher prints about a hang: an error, and how to continue."""
    _, size = rank_and_size()
    text = text if size > 1 else text.removeprefix("rank 0: ")
    return "\n".join([f"error: {text}", "the job has ended", *to_continue(folder, size)])


def _opened(rank: int, size: int) -> heartbeat.Heartbeat:
    try:
        return heartbeat.open_heartbeat(rank, size)
    except OSError as error:
        raise UserError(
            f"{KEY}: expected room for a file of {heartbeat.SIZE:,} bytes in {heartbeat.folder_of_heartbeats()}, found "
            f"{error}; make room, or set it to 0, which is no watch"
        ) from error


def _settings(
    fault: FaultConfig, folder: Path, judges: bool = True, record: Callable[[Hang], None] | None = None
) -> WatchSettings:
    return WatchSettings(
        fault.stall_seconds, folder / "hangs", KEY, judges=judges, strict=True, record=record
    )


def _prepare(compile: str) -> None:
    """Let compilation take its time: later steps may compile again."""
    if compile != "none":
        call_before_compiling(heartbeat.be_patient)
