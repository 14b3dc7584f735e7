"""Measurements in processes of their own, and looks with a limit of time: a driver or a disk that hangs costs seconds.

A process can be killed, unlike a thread. One that a disk holds (state D) cannot: then nobody waits for it. Nothing here
knows what is measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any

from shardwright.cli.doctor.words import without_names
from shardwright.common.package import FOLDER

CHILD = "shardwright.cli.doctor.child"
OF_LAUNCHERS = ("GROUP_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_SIZE")
"""Beginnings of variables that make a process a rank of somebody's job."""


class Unmeasured(Exception):
    """A measurement that failed or took too long; its text is the reason."""


class TooLate(Unmeasured):
    """A measurement that did not end in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it did not end within {seconds:g} s")


def measure_in_children(calls: Sequence[Sequence[Any]], seconds: float) -> list[dict[str, Any]]:
    """The results of measurements that run at once, each in a process: name and arguments of a row of `child.CALLS`.

    Raises:
        TooLate: not all have ended after so many seconds.
        Unmeasured: one of them failed. In both cases no process stays.
    """
    started: list[_Process] = []
    deadline = time.monotonic() + seconds
    try:
        for call in calls:
            started.append(_Process([*call, seconds]))
        while any(each.status is None for each in started):
            if any(each.status for each in started):
                break  # the others would wait for it
            if time.monotonic() > deadline:
                raise TooLate(seconds)
            time.sleep(0.02)
        for each in started:
            if each.status:
                raise Unmeasured(each.reason)
        return [each.result for each in started]
    except OSError as error:
        raise Unmeasured(f"no process could be started ({error.strerror or error})") from None
    finally:
        for each in started:
            each.end()


def within(seconds: float, look: Callable[[], Any]) -> Any:
    """The result of a call on a thread, whose exceptions are raised here.

    Raises:
        TooLate: it has not returned after so many seconds. The thread goes on and ends with the process.
    """
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, look()))
        except Exception as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True, name="doctor")
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TooLate(seconds)
    done, value = outcome[0]
    if not done:
        raise value
    return value


def _environment() -> dict[str, str]:
    """The environment of a process that is no rank, has one thread, and finds the same package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    path = os.pathsep.join(each for each in (os.path.dirname(FOLDER), kept.get("PYTHONPATH", "")) if each)
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class _Process:
    """A process and what it prints, in files without names: a pipe could fill up and hold it."""

    def __init__(self, call: Sequence[Any]) -> None:
        self.output, self.errors = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - see end()
        self.process = subprocess.Popen(
            [sys.executable, "-m", CHILD, json.dumps(call)],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.errors,
            env=_environment(),
            start_new_session=True,
        )

    @property
    def status(self) -> int | None:
        return self.process.poll()

    @property
    def result(self) -> dict[str, Any]:
        try:
            result: dict[str, Any] = json.loads(_lines(self.output)[-1])
        except (ValueError, IndexError):
            raise Unmeasured("its process printed no result") from None
        return result

    @property
    def reason(self) -> str:
        """Why it failed, as one line."""
        status, lines = self.status or 0, _lines(self.errors)
        if status < 0:
            return f"its process was ended by signal {-status}"
        return without_names(lines[-1])[:200] if lines else f"its process ended with status {status}"

    def end(self) -> None:
        if self.process.poll() is None:
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # one that a disk holds does not end; nobody waits for it
        self.output.close()
        self.errors.close()


def _lines(stream: IO[str]) -> list[str]:
    stream.seek(0)
    return [line.strip() for line in stream.read().splitlines() if line.strip()]
