"""Processes that may hang, abort or be killed: each in a session of its own, with its output in a file, and ended so
that its output says where it was.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

STACK_SECONDS = 5.0
"""How long a process may take to write its stacks before it is killed."""
SETTINGS = {
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
"""Variables with which Python and torch say where they were."""


_asked_to_end = threading.Event()


def end_processes_on_sigterm() -> None:
    """Let :func:`end_if_asked` end this program after SIGTERM.

    The processes are in sessions of their own, so nobody else ends them. An exception in the signal's handler could be
    raised while one is being started, and nobody would know it.
    """
    signal.signal(signal.SIGTERM, lambda *_: _asked_to_end.set())


def end_if_asked() -> None:
    """Raise SystemExit if the signal has arrived. A loop that waits for processes calls it, and ends them then."""
    if _asked_to_end.is_set():
        sys.exit(143)


def start(
    command: list[str], log: Path, environment: dict[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    """Start a process whose stdout and stderr go to ``log``, and which writes its stacks when it is aborted."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # an abort on purpose leaves no file
    with log.open("wb") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment | SETTINGS,
            start_new_session=True,
        )


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes and what they started. Those that still run first write the stacks of all their threads."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(0.02)
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # such as the compiler's own processes
        except (ProcessLookupError, PermissionError):
            pass
    deadline = time.monotonic() + STACK_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):  # a driver may keep a process
            process.wait(max(0.0, deadline - time.monotonic()))


def output_of(log: Path, longest: int = 40_000) -> str:
    """The output; of a long one the beginning and the end."""
    if not log.exists():
        return ""
    text = log.read_text(errors="replace")
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
