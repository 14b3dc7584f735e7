"""A command that trains, and its status from the run's exit.json: torchrun, among others, hides the status of ranks.

It passes signals on, so it can be the first process of a container. It imports no torch, so it is there at once. A
mistake may be found before there is a run, and so no exit.json: then the ranks write into a file of the relay.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from shardwright.train.errors import UserError
from shardwright.train.launch.signals import SIGNALS

SECONDS_FOR_STATUS = 15.0
"""Time that the relay waits for exit.json, which a rank on another host may write, after the command has failed."""
MISTAKE_VARIABLE = "SHARDWRIGHT_MISTAKE_FILE"
"""Set for the command: the file that says whether a rank on this host ended with a mistake of the user."""


def relay(folder: Path, command: Sequence[str]) -> int:
    """Run the command. Return the status in `folder`/exit.json if it was written meanwhile, else the command's.

    Without exit.json the status is 2 if a rank on this host ended with a mistake of the user. Raises UserError if the
    command cannot be started.
    """
    old = _stamp(folder)
    with tempfile.NamedTemporaryFile(prefix="shardwright-relay-") as mistakes:
        status = _run(command, {**os.environ, MISTAKE_VARIABLE: mistakes.name})
        deadline = time.monotonic() + (SECONDS_FOR_STATUS if status else 0.0)
        while (recorded := _recorded(folder, old)) is None and time.monotonic() < deadline:
            if os.path.getsize(mistakes.name):
                return UserError.MISTAKE
            time.sleep(0.2)
    return status if recorded is None else recorded


def note_mistake(status: int) -> None:
    """Let the relay above this process know, if there is one, that a rank ends with a mistake of the user."""
    file = os.environ.get(MISTAKE_VARIABLE)
    if file and status == UserError.MISTAKE:
        try:
            with open(file, "a", encoding="utf-8") as stream:
                stream.write("mistake\n")
        except OSError:
            pass  # the relay is gone, or the disk is full: the status of the launcher remains


def _run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Return the status of the command, to which signals are passed on. Raises UserError if it cannot be started."""
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        process = subprocess.Popen(command, env=variables)
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
    return 128 - status if status < 0 else status  # as a shell says that a signal ended it


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Return a value that changes if exit.json is written again."""
    try:
        status = os.stat(folder / "exit.json")
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _recorded(folder: Path, old: tuple[int, int] | None) -> int | None:
    if _stamp(folder) == old:
        return None
    try:
        status = json.loads((folder / "exit.json").read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return status if type(status) is int and 0 <= status <= 255 else None
