"""The processes of one row, one for each rank, in sessions of their own, and what they wrote.

This end trusts nothing of them: they may hang, be killed, or leave half a line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_rows.rows import Row

NOT_DONE = "not done after"
GRACE = 10.0
"""Seconds that the other ranks get to end by themselves when one has failed, and all of them after the deadline."""


def run_row(
    row: Row, program: Path, order: dict[str, Any], environment: dict[str, str], seconds: float
) -> dict[str, Any]:
    """What the processes of a row measured: ``lines`` of all ranks, ``error`` if they did not end well, ``seconds``.

    ``late`` says whether they were ended because their time was over.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        order = order | {"row": row.as_json(), "deadline": time.time() + max(0.0, seconds - GRACE)}
        (folder / "order.json").write_text(json.dumps(order))
        processes = []
        try:
            for rank in range(order["ranks"]):
                with (folder / f"rank{rank}.log").open("w") as log:
                    command = [sys.executable, str(program), "--work", str(folder), str(rank)]
                    process = subprocess.Popen(
                        command, stdout=log, stderr=log, env=environment, start_new_session=True
                    )
                processes.append(process)
            error = _wait(processes, begun + seconds, seconds)
        finally:
            for process in processes:
                _end(process)
        if error:
            logs = [_text(folder / f"rank{rank}.log")[-1500:] for rank in range(order["ranks"])]
            error = "\n".join([error, *dict.fromkeys(log for log in logs if log.strip())])
        lines = [line for rank in range(order["ranks"]) for line in _lines(folder / f"rank{rank}.jsonl")]
    late = error.startswith(NOT_DONE)
    return {"lines": lines, "error": error, "late": late, "seconds": round(time.monotonic() - begun, 1)}


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float, seconds: float) -> str:
    """Why the row did not end well; nothing if all processes ended with status 0."""
    while True:
        states = [process.poll() for process in processes]
        if all(state == 0 for state in states):
            return ""
        failed = [(rank, state) for rank, state in enumerate(states) if state]
        if failed and (None not in states or time.monotonic() > deadline):
            return "; ".join(f"rank {rank} ended with status {state}" for rank, state in failed)
        if failed:
            deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            return f"{NOT_DONE} {seconds:.0f} s"
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, such as the compiler's own processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in _text(path).splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # the process was ended while it wrote
            continue
    return lines
