"""A command that trains, and its status from the run's exit.json: torchrun, among others, hides the status of ranks.

It passes signals on, so it can be the first process of a container. It imports no torch, so it is there at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from shardwright.train.errors import UserError

SECONDS_FOR_STATUS = 15.0
"""How long it waits for exit.json, which a rank on another host may write, after the command has failed."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def relay(folder: Path, command: Sequence[str]) -> int:
    """Run the command. Return the status in `folder`/exit.json if it was written meanwhile, else that of the command.

    Raises UserError if the command cannot be started.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    old = _stamp(folder)
    try:
        process = subprocess.Popen(command)
        for number in received:
            process.send_signal(number)  # it came while the command was starting
        status = process.wait()
    except OSError as error:
        raise UserError(
            f"relay: cannot start {command[0]}: {error.strerror}; write the command after --"
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status < 0:
        status = 128 - status  # as a shell says that a signal ended it
    deadline = time.monotonic() + (SECONDS_FOR_STATUS if status else 0.0)
    while (recorded := _recorded(folder, old)) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    return status if recorded is None else recorded


def _stamp(folder: Path) -> tuple[int, int] | None:
    """What changes if exit.json is written again."""
    try:
        found = os.stat(folder / "exit.json")
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _recorded(folder: Path, old: tuple[int, int] | None) -> int | None:
    if _stamp(folder) == old:
        return None
    try:
        status = json.loads((folder / "exit.json").read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return status if type(status) is int and 0 <= status <= 255 else None
